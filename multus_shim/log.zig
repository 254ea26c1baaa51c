//! The shim's own log, as the configuration asks for it: one line for each call that failed, and at `verbose` one for
//! each that did not.
//!
//! Keys, levels and the shape of a line are those of the daemon and of upstream's shim. A line is written when stdout
//! has its answer, in one write(2) at the end of the file, and whatever goes wrong with it changes nothing: the file
//! has to be a regular one, is opened only when there is a line, and is put aside as `<logFile>.1`, in place of an older
//! one, before it has more than `logOptions.maxSize` MB.

const std = @import("std");
const linux = std.os.linux;
const netconf = @import("netconf.zig");
const sys = @import("sys.zig");
const text = @import("text.zig");
const Buffer = text.Buffer;

pub const Level = enum { panic, @"error", verbose, debug };

/// MB before the file is put aside, as in `multus_daemon/logs.py`.
const default_max_size = 100;
/// Bytes of what came from outside that go into a line.
const max_shown = 4096;
/// flock(2), the same on every architecture.
const lock_ex = 2;
const lock_nb = 4;
/// How long a reader of stderr may take for a line.
const stderr_ms = 1000;

var level: Level = .@"error";
var to_stderr = false;
var file: [:0]const u8 = "";
var max_bytes: u64 = 0;
/// "ADD of container c0ffee interface eth0".
var call: Buffer = .{};

/// Sets up the log. What is of a wrong type or value is as not given: a log is no reason to refuse a call.
pub fn configure(conf: *const netconf.Netconf, verb: []const u8, container: []const u8, ifname: []const u8) text.Error!void {
    try call.add(verb);
    if (container.len > 0) try call.all(.{ " of container ", container });
    if (ifname.len > 0) try call.all(.{ " interface ", ifname });
    const asked = try word(&conf.log_level);
    for (std.enums.values(Level)) |known| {
        if (text.sameWord(asked, @tagName(known))) level = known;
    }
    to_stderr = std.mem.eql(u8, conf.log_to_stderr.raw orelse "false", "true");
    max_bytes = default_max_size * 1024 * 1024;
    if (conf.log_options.raw) |options| if (try netconf.member(options, "maxSize", .number)) |raw| {
        if (std.fmt.parseInt(u32, raw, 10)) |megabytes| {
            if (megabytes > 0) max_bytes = @as(u64, megabytes) * 1024 * 1024;
        } else |_| {}
    };
    const path = try word(&conf.log_file);
    if (path.len == 0 or std.mem.indexOfScalar(u8, path, 0) != null) return;
    var kept: Buffer = .{};
    try kept.all(.{ path, "\x00" });
    file = kept.bytes()[0..path.len :0];
}

fn word(slot: *const netconf.Slot) text.Error![]const u8 {
    var out: Buffer = .{};
    if (slot.raw) |raw| try netconf.unquote(raw, &out);
    return out.bytes();
}

/// The call has ended: `stdout` was printed, and the exit status is `status`.
pub fn ended(stdout: []const u8, status: u8, taken: bool) void {
    if (status == 0) return put(.verbose, "done", "");
    if (!taken) return put(.@"error", "the runtime did not take the answer from stdout: ", stdout);
    reported(stdout) catch {};
}

fn reported(stdout: []const u8) text.Error!void {
    if (@intFromEnum(level) < @intFromEnum(Level.@"error")) return;
    var shown: Buffer = .{};
    if (netconf.syntax(stdout) != null) return put(.@"error", "failed: ", stdout);
    try shown.all(.{ "code ", try netconf.member(stdout, "code", .number) orelse "none", ": " });
    try shown.add(try netconf.stringMember(stdout, "msg"));
    const details = try netconf.stringMember(stdout, "details");
    if (details.len > 0) try shown.all(.{ "; ", details });
    put(.@"error", "failed with ", shown.bytes());
}

/// Whether lines of the level go to stderr.
pub fn isOnStderr(of: Level) bool {
    return to_stderr and @intFromEnum(of) <= @intFromEnum(level);
}

/// Writes a line, if the level is high enough: `head`, then `foreign`, cut and without control characters.
pub fn put(of: Level, head: []const u8, foreign: []const u8) void {
    if (@intFromEnum(of) > @intFromEnum(level) or (file.len == 0 and !to_stderr)) return;
    var line: Buffer = .{};
    compose(&line, of, head, foreign) catch return;
    if (to_stderr) _ = sys.writeAll(2, line.bytes(), .in(stderr_ms));
    if (file.len > 0) append(line.bytes());
}

fn compose(line: *Buffer, of: Level, head: []const u8, foreign: []const u8) text.Error!void {
    try time(line, sys.realtime() / 1_000_000);
    try line.all(.{ " [", @tagName(of), "] multus-shim[", @as(u32, @intCast(linux.getpid())), "]: ", call.bytes(), ": " });
    try line.add(head);
    var i: usize = 0;
    while (i < @min(foreign.len, max_shown)) {
        const r = text.rune(foreign[i..]);
        try line.printable(if (r.valid) r.code else '?', if (r.valid) foreign[i .. i + r.len] else "?", 0);
        i += r.len;
    }
    if (foreign.len > max_shown) try line.all(.{ "... (", foreign.len, " bytes)" });
    try line.byte('\n');
}

/// RFC 3339, in UTC: the shim knows no time zones.
fn time(line: *Buffer, ms: u64) text.Error!void {
    const seconds: std.time.epoch.EpochSeconds = .{ .secs = ms / 1000 };
    const year = seconds.getEpochDay().calculateYearDay();
    const month = year.calculateMonthDay();
    const day = seconds.getDaySeconds();
    try line.padded(year.year, 4);
    for ([_]u64{ month.month.numeric(), month.day_index + 1 }) |n| {
        try line.byte('-');
        try line.padded(n, 2);
    }
    for ([_]u64{ day.getHoursIntoDay(), day.getMinutesIntoHour(), day.getSecondsIntoMinute() }, "T::") |n, mark| {
        try line.byte(mark);
        try line.padded(n, 2);
    }
    try line.byte('.');
    try line.padded(ms % 1000, 3);
    try line.byte('Z');
}

fn append(line: []const u8) void {
    var fd = open() orelse return;
    if (sys.regularSize(fd)) |size| {
        if (size + line.len > max_bytes and putAside(fd)) {
            _ = linux.close(fd);
            fd = open() orelse return;
        }
        _ = linux.write(fd, line.ptr, line.len);
    }
    _ = linux.close(fd);
}

/// NONBLOCK: a FIFO without a reader is not waited for. Only root may read it, as pods' names and addresses are in it.
fn open() ?i32 {
    const flags: linux.O = .{
        .ACCMODE = .WRONLY,
        .APPEND = true,
        .CREAT = true,
        .NONBLOCK = true,
        .NOCTTY = true,
        .CLOEXEC = true,
    };
    const rc = linux.openat(linux.AT.FDCWD, file, flags, 0o600);
    if (linux.errno(rc) == .SUCCESS) return @intCast(rc);
    var space: [32]u8 = undefined;
    var note: Buffer = .{};
    note.all(.{ "multus-shim: logFile ", file, " cannot be opened: ", sys.errnoName(linux.errno(rc), &space), "\n" }) catch
        return null;
    _ = sys.writeAll(2, note.bytes(), .in(stderr_ms));
    return null;
}

/// Renames the file that `fd` is; true where another one is to be opened, also where somebody else has renamed it. Of
/// several shims one does it: whoever has the lock, and finds the file still in its place.
fn putAside(fd: i32) bool {
    if (linux.errno(linux.flock(fd, lock_ex | lock_nb)) != .SUCCESS) return false;
    if (!sys.isAt(fd, file)) return true;
    var aside: Buffer = .{};
    aside.all(.{ file, ".1\x00" }) catch return false;
    return sys.rename(linux.AT.FDCWD, file, aside.bytes()[0 .. aside.len - 1 :0]) == .SUCCESS;
}
