//! What the shim needs from the kernel: clocks, deadlines and I/O that cannot block past them.
//!
//! System calls are made directly; a failure is the kernel's errno, never a guess.

const std = @import("std");
const linux = std.os.linux;
const text = @import("text.zig");

pub const Errno = linux.E;

/// "ENOENT (no such file)"; a rare error without the words, for numbers without a name "an unknown error".
pub fn errnoName(e: Errno, space: *[32]u8) []const u8 {
    switch (e) {
        .NOENT => return "ENOENT (no such file)",
        .CONNREFUSED => return "ECONNREFUSED (nobody listens)",
        .ACCES => return "EACCES (permission denied)",
        .NOSPC => return "ENOSPC (no space left)",
        .ROFS => return "EROFS (read-only file system)",
        else => {},
    }
    const tag = std.enums.tagName(Errno, e) orelse return "an unknown error";
    space[0] = 'E';
    @memcpy(space[1 .. 1 + tag.len], tag);
    return space[0 .. 1 + tag.len];
}

const Time64 = extern struct { sec: i64, nsec: i64 };

/// Nanoseconds of the clock. 32-bit machines ask through the 64-bit call, so that file names stay right after 2038.
fn clock(id: linux.clockid_t) u64 {
    if (@sizeOf(usize) == 4 and @hasField(linux.SYS, "clock_gettime64")) {
        var t: Time64 = undefined;
        const number: u32 = if (id == .REALTIME) 0 else 1;
        if (linux.errno(linux.syscall2(.clock_gettime64, number, @intFromPtr(&t))) == .SUCCESS)
            return @as(u64, @intCast(t.sec)) * 1_000_000_000 + @as(u32, @intCast(t.nsec));
    }
    var ts: linux.timespec = undefined;
    _ = linux.clock_gettime(id, &ts);
    return @as(u64, @intCast(ts.sec)) * 1_000_000_000 + @as(u32, @intCast(ts.nsec));
}

pub fn realtime() u64 {
    return clock(.REALTIME);
}

/// A point on the monotonic clock.
pub const Deadline = struct {
    at: u64,

    pub fn in(ms: u64) Deadline {
        return .{ .at = clock(.MONOTONIC) + ms * 1_000_000 };
    }

    /// Milliseconds left, rounded up; 0 when it has passed.
    pub fn left(self: Deadline) u64 {
        const now = clock(.MONOTONIC);
        return if (now >= self.at) 0 else (self.at - now + 999_999) / 1_000_000;
    }
};

pub const Wait = union(enum) { ready, late, failed: Errno };

/// Waits until `fd` can be read (or written), at most until the deadline.
pub fn wait(fd: i32, events: i16, deadline: Deadline) Wait {
    while (true) {
        const ms = deadline.left();
        if (ms == 0) return .late;
        var fds = [1]linux.pollfd{.{ .fd = fd, .events = events, .revents = 0 }};
        const rc = linux.poll(&fds, 1, @intCast(@min(ms, 1_000_000)));
        switch (linux.errno(rc)) {
            .SUCCESS => if (rc != 0) {
                if (fds[0].revents & linux.POLL.NVAL != 0) return .{ .failed = .BADF };
                return .ready;
            },
            .INTR => {},
            else => |e| return .{ .failed = e },
        }
    }
}

pub fn sleep(ms: u64) void {
    var none = [0]linux.pollfd{};
    _ = linux.poll(&none, 0, @intCast(ms));
}

pub const ReadAll = union(enum) { whole, too_long, late, failed: Errno, no_memory };

/// Reads `fd` to its end.
pub fn readAll(fd: i32, into: *text.Buffer, limit: usize, deadline: Deadline) ReadAll {
    while (true) {
        switch (wait(fd, linux.POLL.IN, deadline)) {
            .ready => {},
            .late => return .late,
            .failed => |e| return .{ .failed = e },
        }
        const space = into.room(4096) catch return .no_memory;
        const rc = linux.read(fd, space.ptr, space.len);
        switch (linux.errno(rc)) {
            .SUCCESS => {},
            .INTR, .AGAIN => continue,
            else => |e| return .{ .failed = e },
        }
        if (rc == 0) return .whole;
        into.len += rc;
        if (into.len > limit) return .too_long;
    }
}

/// Writes all of `bytes` to a pipe, file or terminal; false when that failed or took longer than the deadline.
///
/// NB: the descriptor belongs to the runtime and is left in blocking mode (O_NONBLOCK would be shared with it). A pipe
/// that polls as writable takes PIPE_BUF bytes at once, so pieces of that size never block.
pub fn writeAll(fd: i32, bytes: []const u8, deadline: Deadline) bool {
    var rest = bytes;
    while (rest.len > 0) {
        switch (wait(fd, linux.POLL.OUT, deadline)) {
            .ready => {},
            else => return false,
        }
        const rc = linux.write(fd, rest.ptr, @min(rest.len, 4096));
        switch (linux.errno(rc)) {
            .SUCCESS => rest = rest[rc..],
            .INTR, .AGAIN => {},
            else => return false,
        }
    }
    return true;
}

/// Descriptors 0-2 are filled when the runtime left them closed: otherwise the socket could become descriptor 1 and an
/// error object be sent to the daemon. What fills them refuses reads and writes, so they still fail as closed ones do.
pub fn guardStandardDescriptors() void {
    var fd: i32 = 0;
    while (fd < 3) : (fd += 1) {
        if (linux.errno(linux.fcntl(fd, linux.F.GETFD, 0)) == .BADF)
            _ = linux.openat(linux.AT.FDCWD, "/", .{ .PATH = true }, 0);
    }
}

pub fn ignoreBrokenPipes() void {
    const act: linux.Sigaction = .{ .handler = .{ .handler = linux.SIG.IGN }, .mask = std.mem.zeroes(linux.sigset_t), .flags = 0 };
    _ = linux.sigaction(.PIPE, &act, null);
}

/// Whether both paths lead to the same file. False when either cannot be looked at.
pub fn sameFile(a: [*:0]const u8, b: [*:0]const u8) bool {
    const x = look(linux.AT.FDCWD, a, 0) orelse return false;
    const y = look(linux.AT.FDCWD, b, 0) orelse return false;
    return isSame(&x, &y);
}

/// Whether `path` leads to the open file `fd`.
pub fn isAt(fd: i32, path: [*:0]const u8) bool {
    const x = look(fd, "", linux.AT.EMPTY_PATH) orelse return false;
    const y = look(linux.AT.FDCWD, path, 0) orelse return false;
    return isSame(&x, &y);
}

/// The size of an open regular file; null for anything else.
pub fn regularSize(fd: i32) ?u64 {
    const x = look(fd, "", linux.AT.EMPTY_PATH) orelse return null;
    return if (x.mode & linux.S.IFMT == linux.S.IFREG) x.size else null;
}

fn look(directory: i32, path: [*:0]const u8, flags: u32) ?linux.Statx {
    var found: linux.Statx = undefined;
    const wanted: linux.STATX = .{ .TYPE = true, .INO = true, .SIZE = true };
    return if (linux.errno(linux.statx(directory, path, flags, wanted, &found)) == .SUCCESS) found else null;
}

fn isSame(x: *const linux.Statx, y: *const linux.Statx) bool {
    return x.ino == y.ino and x.dev_major == y.dev_major and x.dev_minor == y.dev_minor;
}

/// Not rename(2): newer architectures have only the "at" forms, riscv64 only the one with flags.
pub fn rename(directory: i32, from: [:0]const u8, to: [:0]const u8) Errno {
    const at: u32 = @bitCast(directory);
    return linux.errno(linux.syscall5(.renameat2, at, @intFromPtr(from.ptr), at, @intFromPtr(to.ptr), 0));
}
