//! DELs that the daemon could not take.
//!
//! The runtime is told that such a DEL has succeeded (it would be right to, for a plugin that has nothing left to do),
//! so the request must outlive the shim, the daemon and the machine's power: one file per request in the spool, which
//! the daemon replays and empties. The file holds exactly the body that would have been POSTed to `/cni`.
//!
//! Name: `<realtime in ns, 20 digits>-<pid>.json`, so that the order of names is the order of requests. Mode 0600 in a
//! directory of mode 0700 (a request carries the network configuration). The file appears under its name only when it
//! is complete and on disk: temporary dot-file, fsync, rename, fsync of the directory. A dot-file left by a crash holds
//! a request whose runtime was not told "done"; the daemon may remove it.

const std = @import("std");
const linux = std.os.linux;
const sys = @import("sys.zig");
const text = @import("text.zig");
const Buffer = text.Buffer;

pub const Result = union(enum) {
    /// The path of the new file.
    written: []const u8,
    failed: struct { step: []const u8, path: []const u8, errno: sys.Errno },
};

fn failure(step: []const u8, path: []const u8, rc: usize) ?Result {
    const e = linux.errno(rc);
    return if (e == .SUCCESS) null else .{ .failed = .{ .step = step, .path = path, .errno = e } };
}

/// Writes `body` to a new file in `<cni_dir>/spool`. On failure nothing is left but directories.
pub fn write(cni_dir: []const u8, body: []const u8) text.Error!Result {
    // Only the modes given here count, not what the runtime happens to run with.
    _ = linux.syscall1(.umask, 0o022);
    var path: Buffer = .{};
    try path.all(.{ std.mem.trimEnd(u8, cni_dir, "/"), "/spool" });
    const dir_len = path.len;
    var whole: Buffer = .{};
    try whole.all(.{ path.bytes(), "/" });
    try path.byte(0);
    const dir_path = path.bytes()[0..dir_len :0];
    if (try makeDirectories(dir_path)) |failed| return failed;
    const dir_rc = linux.openat(linux.AT.FDCWD, dir_path, .{ .DIRECTORY = true, .NOFOLLOW = true, .CLOEXEC = true }, 0);
    if (failure("open", dir_path, dir_rc)) |failed| return failed;
    const dir: i32 = @intCast(dir_rc);

    var temporary: Buffer = .{};
    try temporary.byte('.');
    try temporary.padded(sys.realtime(), 20);
    try temporary.all(.{ "-", @as(u32, @intCast(linux.getpid())), ".json" });
    const name_len = temporary.len;
    try whole.add(temporary.bytes()[1..]);
    var final: Buffer = .{};
    try final.all(.{ temporary.bytes()[1..], "\x00" });
    try temporary.add(".tmp\x00");
    const file = temporary.bytes()[0 .. temporary.len - 1 :0];
    const name = final.bytes()[0 .. name_len - 1 :0];

    const fd_rc = linux.openat(dir, file, .{ .ACCMODE = .WRONLY, .CREAT = true, .EXCL = true, .NOFOLLOW = true, .CLOEXEC = true }, 0o600);
    if (failure("create a file in", dir_path, fd_rc)) |failed| return failed;
    if (fillFile(@intCast(fd_rc), dir, file, name, body, whole.bytes())) |failed| {
        _ = linux.unlinkat(dir, file, 0);
        return failed;
    }
    if (syncDirectory(dir, dir_path)) |failed| return failed;
    return .{ .written = whole.bytes() };
}

fn fillFile(fd: i32, dir: i32, file: [:0]const u8, name: [:0]const u8, body: []const u8, path: []const u8) ?Result {
    var rest = body;
    while (rest.len > 0) {
        const rc = linux.write(fd, rest.ptr, rest.len);
        if (linux.errno(rc) == .INTR) continue;
        if (failure("write", path, rc)) |failed| return failed;
        rest = rest[rc..];
    }
    if (failure("fsync", path, linux.fsync(fd))) |failed| return failed;
    if (failure("close", path, linux.close(fd))) |failed| return failed;
    const e = sys.rename(dir, file, name);
    return if (e == .SUCCESS) null else .{ .failed = .{ .step = "rename", .path = path, .errno = e } };
}

/// A file system that cannot sync directories says EINVAL; it has nothing better to offer.
fn syncDirectory(dir: i32, path: []const u8) ?Result {
    const rc = linux.fsync(dir);
    if (linux.errno(rc) == .INVAL) return null;
    return failure("fsync", path, rc);
}

/// Makes `path` and what is missing above it: the last two (cniDir and its spool) for root only, the rest as usual.
fn makeDirectories(path: [:0]const u8) text.Error!?Result {
    var names: usize = 0;
    for (path, 1..) |c, i| names += @intFromBool(c != '/' and (i == path.len or path[i] == '/'));
    var part: Buffer = .{};
    var above: usize = 0;
    for (path, 1..) |c, i| {
        if (c == '/' or (i < path.len and path[i] != '/')) continue;
        names -= 1;
        part.len = 0;
        try part.all(.{ path[0..i], "\x00" });
        const rc = linux.mkdirat(linux.AT.FDCWD, part.bytes()[0..i :0], if (names < 2) 0o700 else 0o755);
        if (linux.errno(rc) != .EXIST) {
            if (failure("make the directory", path[0..i], rc)) |failed| return failed;
            if (try syncParent(path[0..above], path[0] == '/')) |failed| return failed;
        }
        above = i;
    }
    return null;
}

/// A directory is on disk only when the one above it is.
fn syncParent(path: []const u8, absolute: bool) text.Error!?Result {
    var parent: Buffer = .{};
    try parent.all(.{ path, if (path.len == 0) (if (absolute) "/" else ".") else "", "\x00" });
    const rc = linux.openat(linux.AT.FDCWD, parent.bytes()[0 .. parent.len - 1 :0], .{ .DIRECTORY = true, .CLOEXEC = true }, 0);
    if (failure("open", path, rc)) |failed| return failed;
    const fd: i32 = @intCast(rc);
    defer _ = linux.close(fd);
    return syncDirectory(fd, path);
}
