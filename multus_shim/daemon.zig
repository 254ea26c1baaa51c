//! One call of the multus daemon: connect to its unix socket, POST the request, take the whole reply.
//!
//! Only as much HTTP/1.1 as two programs on one machine need, and strict about it: a reply counts only when it is
//! complete, since half a CNI result on stdout is worse than an error. The size of a reply is known from
//! Content-Length or chunked framing; "until the connection closes" is refused because it looks the same as a daemon
//! that died half way.

const std = @import("std");
const linux = std.os.linux;
const sys = @import("sys.zig");
const text = @import("text.zig");
const Buffer = text.Buffer;

/// The media type of bodies that are meant for the plugin's stdout as they stand.
pub const stdout_type = "application/vnd.multus.cni-stdout";

pub const max_body = 16 * 1024 * 1024;
pub const max_head = 64 * 1024;

/// Pauses between connection attempts.
const first_pause_ms = 5;
const longest_pause_ms = 250;

/// Room for a path in sockaddr_un, less its terminator.
pub const max_path = 107;

pub const Connection = union(enum) {
    open: i32,
    /// Nobody listened until the deadline: the last error.
    absent: sys.Errno,
    /// An error that waiting does not mend.
    refused: sys.Errno,
};

/// Whether the daemon may just be starting, or be busy with its backlog full.
fn mayPass(e: sys.Errno) bool {
    return switch (e) {
        .NOENT, .NOTDIR, .CONNREFUSED, .CONNRESET, .CONNABORTED, .AGAIN, .INTR, .INPROGRESS, .TIMEDOUT => true,
        else => false,
    };
}

/// Connects to the socket at `path` (at most `max_path` bytes), again and again until the deadline unless `once`.
pub fn connect(path: []const u8, deadline: sys.Deadline, once: bool) Connection {
    var address: linux.sockaddr.un = .{ .path = @splat(0) };
    @memcpy(address.path[0..path.len], path);
    var pause: u64 = first_pause_ms;
    while (true) {
        // A new socket each time: after a failed connect(2) the state of the old one is unspecified (POSIX).
        const made = linux.socket(linux.AF.UNIX, linux.SOCK.STREAM | linux.SOCK.NONBLOCK | linux.SOCK.CLOEXEC, 0);
        const trouble = linux.errno(made);
        if (trouble != .SUCCESS) return .{ .refused = trouble };
        const fd: i32 = @intCast(made);
        const e = linux.errno(linux.connect(fd, &address, @sizeOf(linux.sockaddr.un)));
        if (e == .SUCCESS) return .{ .open = fd };
        _ = linux.close(fd);
        if (!mayPass(e)) return .{ .refused = e };
        const left = deadline.left();
        if (once or left == 0) return .{ .absent = e };
        sys.sleep(@min(pause, left));
        pause = @min(pause * 2, longest_pause_ms);
    }
}

pub const Reply = struct {
    status: u16,
    /// The first line, and the value of Content-Type ("" when there is none).
    status_line: []const u8,
    content_type: []const u8,
    body: []const u8,

    pub fn forStdout(self: *const Reply) bool {
        const end = std.mem.indexOfScalar(u8, self.content_type, ';') orelse self.content_type.len;
        return text.sameWord(trim(self.content_type[0..end]), stdout_type);
    }
};

pub const Outcome = union(enum) {
    reply: Reply,
    late,
    /// No HTTP reply, or one that is not understood: what was seen instead.
    broken: []const u8,
    /// The connection ended before the reply did: how. What a daemon leaves that has ended meanwhile.
    cut: []const u8,
};

/// Sends `head` and `body` and takes the reply, all until the deadline.
pub fn exchange(fd: i32, head: []const u8, body: []const u8, deadline: sys.Deadline) text.Error!Outcome {
    for ([_][]const u8{ head, body }) |piece| switch (send(fd, piece, deadline)) {
        .done => {},
        .late => return .late,
        // It may have answered before it hung up (a server that refuses the request does): look.
        .failed => break,
    };
    var reader: Reader = .{ .fd = fd, .deadline = deadline };
    const reply = reader.reply() catch |e| switch (e) {
        error.OutOfMemory => return error.OutOfMemory,
        error.Late => return .late,
        error.Broken => return .{ .broken = reader.why.bytes() },
        error.Cut => return .{ .cut = reader.why.bytes() },
    };
    return .{ .reply = reply };
}

fn send(fd: i32, bytes: []const u8, deadline: sys.Deadline) enum { done, late, failed } {
    var rest = bytes;
    while (rest.len > 0) {
        const rc = linux.sendto(fd, rest.ptr, rest.len, linux.MSG.NOSIGNAL, null, 0);
        switch (linux.errno(rc)) {
            .SUCCESS => {
                rest = rest[rc..];
                if (rest.len > 0 and deadline.left() == 0) return .late;
            },
            .INTR => {},
            .AGAIN => switch (sys.wait(fd, linux.POLL.OUT, deadline)) {
                .ready => {},
                .late => return .late,
                .failed => return .failed,
            },
            else => return .failed,
        }
    }
    return .done;
}

const Fault = error{ OutOfMemory, Late, Broken, Cut };

const Reader = struct {
    fd: i32,
    deadline: sys.Deadline,
    /// Received and not yet used.
    raw: Buffer = .{},
    head: Buffer = .{},
    body: Buffer = .{},
    why: Buffer = .{},

    fn broken(self: *Reader, parts: anytype) Fault {
        self.why.all(parts) catch |e| return e;
        return error.Broken;
    }

    fn brokenQuoting(self: *Reader, parts: anytype, bytes: []const u8) Fault {
        return self.quoting(error.Broken, parts, bytes);
    }

    fn cutQuoting(self: *Reader, parts: anytype, bytes: []const u8) Fault {
        return self.quoting(error.Cut, parts, bytes);
    }

    fn quoting(self: *Reader, fault: Fault, parts: anytype, bytes: []const u8) Fault {
        self.why.all(parts) catch |e| return e;
        excerpt(&self.why, bytes) catch |e| return e;
        return fault;
    }

    /// Receives more bytes; false at the end of the stream. The reason for a reset connection goes to `why`.
    fn fill(self: *Reader) Fault!bool {
        while (true) {
            switch (sys.wait(self.fd, linux.POLL.IN, self.deadline)) {
                .ready => {},
                .late => return error.Late,
                .failed => |e| return self.lost(e),
            }
            const space = try self.raw.room(16 * 1024);
            const rc = linux.read(self.fd, space.ptr, space.len);
            switch (linux.errno(rc)) {
                .SUCCESS => {},
                .INTR, .AGAIN => continue,
                else => |e| return self.lost(e),
            }
            self.raw.len += rc;
            return rc > 0;
        }
    }

    fn lost(self: *Reader, e: sys.Errno) Fault {
        var space: [32]u8 = undefined;
        const name = sys.errnoName(e, &space);
        self.why.all(.{
            "the connection broke (", name, ") after ", self.seen(), " bytes of a reply",
        }) catch |no| return no;
        return error.Cut;
    }

    fn seen(self: *const Reader) usize {
        return self.head.len + self.body.len + self.raw.len;
    }

    fn reply(self: *Reader) Fault!Reply {
        while (true) {
            try self.readHead();
            const line_end = std.mem.indexOf(u8, self.head.bytes(), "\r\n").?;
            const line = self.head.bytes()[0..line_end];
            const status = statusOf(line) orelse
                return self.brokenQuoting(.{"the reply is not HTTP/1.x; it begins with "}, self.head.bytes());
            // Interim replies (RFC 9110, 15.2) only announce the real one.
            if (status < 200 and status != 101) continue;
            return self.final(status, line);
        }
    }

    /// Moves the next header block, with the empty line at its end, from `raw` to `head`.
    fn readHead(self: *Reader) Fault!void {
        self.head.len = 0;
        var searched: usize = 0;
        while (true) {
            const end = std.mem.indexOfPos(u8, self.raw.bytes(), searched, "\r\n\r\n");
            if ((end orelse self.raw.len) > max_head)
                return self.brokenQuoting(.{
                    "the header block of the reply is longer than ", max_head, " bytes; it begins with ",
                }, self.raw.bytes());
            if (end) |at| {
                try self.head.add(self.raw.bytes()[0 .. at + 4]);
                self.raw.drop(at + 4);
                return;
            }
            // Something else than HTTP need not be waited for.
            const known = @min(self.raw.len, 7);
            if (!std.mem.eql(u8, self.raw.bytes()[0..known], "HTTP/1."[0..known]))
                return self.brokenQuoting(.{"the reply is not HTTP/1.x; it begins with "}, self.raw.bytes());
            searched = self.raw.len -| 3;
            if (!try self.fill()) {
                if (self.raw.len == 0) {
                    try self.why.add("it closed the connection without a reply");
                    return error.Cut;
                }
                return self.cutQuoting(.{
                    "the reply was cut off inside its header block, after ", self.raw.len, " bytes: ",
                }, self.raw.bytes());
            }
        }
    }

    fn final(self: *Reader, status: u16, line: []const u8) Fault!Reply {
        var length: ?u64 = null;
        var chunked = false;
        var content_type: []const u8 = "";
        var lines = std.mem.splitSequence(u8, self.head.bytes()[line.len + 2 ..], "\r\n");
        while (lines.next()) |field| {
            const colon = std.mem.indexOfScalar(u8, field, ':') orelse continue;
            const name = field[0..colon];
            const value = trim(field[colon + 1 ..]);
            if (text.sameWord(name, "content-type")) {
                content_type = value;
            } else if (text.sameWord(name, "content-length")) {
                const n = number(value, 10) orelse
                    return self.brokenQuoting(.{"the reply's Content-Length is no number: "}, value);
                if (length != null and length.? != n) return self.broken(.{"the reply has two different Content-Lengths"});
                length = n;
            } else if (text.sameWord(name, "transfer-encoding")) {
                if (chunked or !text.sameWord(value, "chunked"))
                    return self.brokenQuoting(.{"the reply has a Transfer-Encoding that is not understood: "}, value);
                chunked = true;
            }
        }
        if (chunked and length != null) return self.broken(.{"the reply has both a Content-Length and a Transfer-Encoding"});
        if (chunked) {
            try self.readChunks();
        } else if (length) |n| {
            try self.allow(n);
            try self.take(n);
        } else if (status != 204 and status != 304) {
            try self.why.add("the reply says neither by Content-Length nor by chunks where it ends; ");
            return self.brokenQuoting(.{"it begins with "}, self.head.bytes());
        }
        return .{ .status = status, .status_line = line, .content_type = content_type, .body = self.body.bytes() };
    }

    fn allow(self: *Reader, more: u64) Fault!void {
        if (more > max_body - self.body.len)
            return self.broken(.{
                "the body of the reply is longer than ", max_body, " bytes (", self.body.len +| more, " at least)",
            });
    }

    /// Moves `n` bytes from the stream to `body`.
    fn take(self: *Reader, n: u64) Fault!void {
        var left: usize = @intCast(n);
        while (left > 0) {
            if (self.raw.len == 0 and !try self.fill())
                return self.cutQuoting(.{
                    "the reply was cut off with ", left, " bytes still to come; its body begins with ",
                }, self.body.bytes());
            const now = @min(left, self.raw.len);
            try self.body.add(self.raw.bytes()[0..now]);
            self.raw.drop(now);
            left -= now;
        }
    }

    /// https://www.rfc-editor.org/rfc/rfc9112#section-7.1
    fn readChunks(self: *Reader) Fault!void {
        while (true) {
            const line = try self.readLine();
            const end = std.mem.indexOfScalar(u8, line, ';') orelse line.len;
            const size = number(trim(line[0..end]), 16) orelse
                return self.brokenQuoting(.{"the reply has a chunk whose size is no number: "}, line);
            self.raw.drop(line.len + 2);
            if (size == 0) break;
            try self.allow(size);
            try self.take(size);
            const tail = try self.readLine();
            if (tail.len > 0) return self.brokenQuoting(.{"the reply has a chunk that is longer than its size says, by "}, tail);
            self.raw.drop(2);
        }
        var trailer: usize = 0;
        while (true) {
            const line = try self.readLine();
            const n = line.len;
            self.raw.drop(n + 2);
            if (n == 0) return;
            trailer += n;
            if (trailer > max_head)
                return self.broken(.{
                    "the trailer of the reply is longer than ", max_head, " bytes",
                });
        }
    }

    /// The next line without its end, still in `raw`.
    fn readLine(self: *Reader) Fault![]const u8 {
        var searched: usize = 0;
        while (true) {
            if (std.mem.indexOfPos(u8, self.raw.bytes(), searched, "\r\n")) |at| return self.raw.bytes()[0..at];
            if (self.raw.len > max_head) return self.brokenQuoting(.{"the reply has broken chunk framing: "}, self.raw.bytes());
            searched = self.raw.len -| 1;
            if (!try self.fill())
                return self.cutQuoting(.{
                    "the reply was cut off between chunks, after ", self.body.len, " bytes of its body: ",
                }, self.body.bytes());
        }
    }
};

fn statusOf(line: []const u8) ?u16 {
    if (line.len < 12 or !std.mem.startsWith(u8, line, "HTTP/1.") or !std.ascii.isDigit(line[7]) or line[8] != ' ') return null;
    if (line.len > 12 and line[12] != ' ') return null;
    const n = number(line[9..12], 10) orelse return null;
    return if (n < 100) null else @intCast(n);
}

/// Digits only (no sign, no blanks); null when it is something else. Numbers past 64 bits stay at the largest.
fn number(s: []const u8, base: u8) ?u64 {
    if (s.len == 0) return null;
    var n: u64 = 0;
    for (s) |c| {
        const digit = std.fmt.charToDigit(c, base) catch return null;
        n = (n *| base) +| digit;
    }
    return n;
}

fn trim(s: []const u8) []const u8 {
    return std.mem.trim(u8, s, " \t");
}

/// The first 200 bytes of `bytes`, quoted and escaped.
pub fn excerpt(out: *Buffer, bytes: []const u8) text.Error!void {
    const shown = @min(bytes.len, 200);
    try out.quote(bytes[0..shown]);
    if (shown < bytes.len) try out.all(.{ "... (", bytes.len, " bytes)" });
}
