//! Growing byte buffers, and the text encodings that CNI error objects need.
//!
//! Upstream's plugins are written in Go, and runtimes, tests and people compare their output. So strings are escaped
//! the way Go's encoding/json and %q do it, and broken UTF-8 becomes U+FFFD as it does there.

const std = @import("std");
const linux = std.os.linux;

pub const Error = error{OutOfMemory};

/// The smallest mapping. A multiple of every page size of the supported architectures; pages that are never
/// written cost no memory.
const granule = 64 * 1024;

/// A byte string that grows by mapping pages (never by copying them), so that no allocator has to be linked in.
/// Nothing is ever given back: the process lives for one call.
pub const Buffer = struct {
    area: []u8 = &.{},
    len: usize = 0,

    pub fn bytes(self: *const Buffer) []const u8 {
        return self.area[0..self.len];
    }

    /// At least `n` writable bytes behind the content. Earlier slices of the content are void afterwards.
    pub fn room(self: *Buffer, n: usize) Error![]u8 {
        const need = std.math.add(usize, self.len, n) catch return error.OutOfMemory;
        if (need > self.area.len) {
            const wanted = @max(need, self.area.len *| 2);
            const size = std.math.add(usize, wanted, granule - 1) catch return error.OutOfMemory;
            try self.map(size / granule * granule);
        }
        return self.area[self.len..];
    }

    fn map(self: *Buffer, size: usize) Error!void {
        const rc = if (self.area.len == 0)
            linux.mmap(null, size, .{ .READ = true, .WRITE = true }, .{ .TYPE = .PRIVATE, .ANONYMOUS = true }, -1, 0)
        else
            linux.mremap(self.area.ptr, self.area.len, size, .{ .MAYMOVE = true }, null);
        if (linux.errno(rc) != .SUCCESS) return error.OutOfMemory;
        self.area = @as([*]u8, @ptrFromInt(rc))[0..size];
    }

    pub fn add(self: *Buffer, s: []const u8) Error!void {
        @memcpy((try self.room(s.len))[0..s.len], s);
        self.len += s.len;
    }

    pub fn byte(self: *Buffer, c: u8) Error!void {
        (try self.room(1))[0] = c;
        self.len += 1;
    }

    pub fn number(self: *Buffer, n: u64) Error!void {
        try self.padded(n, 1);
    }

    /// `n` in decimal with at least `width` digits.
    pub fn padded(self: *Buffer, n: u64, width: usize) Error!void {
        var digits: [20]u8 = undefined;
        var rest = n;
        var at: usize = digits.len;
        while (rest != 0 or digits.len - at < width) {
            at -= 1;
            digits[at] = '0' + @as(u8, @intCast(rest % 10));
            rest /= 10;
        }
        try self.add(digits[at..]);
    }

    /// Milliseconds as seconds with one decimal, for people.
    pub fn seconds(self: *Buffer, ms: u64) Error!void {
        try self.number(ms / 1000);
        try self.byte('.');
        try self.number(ms % 1000 / 100);
        try self.add(" s");
    }

    /// Drops the first `n` bytes.
    pub fn drop(self: *Buffer, n: usize) void {
        std.mem.copyForwards(u8, self.area[0 .. self.len - n], self.area[n..self.len]);
        self.len -= n;
    }

    /// All of `parts`, strings and unsigned numbers, one behind the other.
    pub fn all(self: *Buffer, parts: anytype) Error!void {
        inline for (parts) |part| switch (@typeInfo(@TypeOf(part))) {
            .int, .comptime_int => try self.number(part),
            else => try self.add(part),
        };
    }

    /// A JSON string as Go's encoder writes it: `<`, `>`, `&`, U+2028 and U+2029 escaped too, invalid UTF-8 as \ufffd.
    pub fn json(self: *Buffer, s: []const u8) Error!void {
        try self.byte('"');
        var i: usize = 0;
        while (i < s.len) {
            const r = rune(s[i..]);
            const raw = s[i .. i + r.len];
            i += r.len;
            if (!r.valid) {
                try self.add("\\ufffd");
            } else switch (r.code) {
                '"', '\\' => try self.all(.{ "\\", raw }),
                '\n' => try self.add("\\n"),
                '\r' => try self.add("\\r"),
                '\t' => try self.add("\\t"),
                8 => try self.add("\\b"),
                12 => try self.add("\\f"),
                0...7, 11, 14...31, '<', '>', '&', 0x2028, 0x2029 => {
                    try self.add("\\u");
                    try self.hex(r.code, 4);
                },
                else => try self.add(raw),
            }
        }
        try self.byte('"');
    }

    /// A quoted string as Go's %q writes it.
    pub fn quote(self: *Buffer, s: []const u8) Error!void {
        try self.byte('"');
        var i: usize = 0;
        while (i < s.len) {
            const r = rune(s[i..]);
            const raw = s[i .. i + r.len];
            i += r.len;
            if (!r.valid) {
                try self.add("\\x");
                try self.hex(raw[0], 2);
            } else try self.printable(r.code, raw, '"');
        }
        try self.byte('"');
    }

    /// One character of a Go quotation; `mark` is the quotation mark around it.
    pub fn printable(self: *Buffer, code: u21, raw: []const u8, mark: u8) Error!void {
        switch (code) {
            '\\' => try self.add("\\\\"),
            7 => try self.add("\\a"),
            8 => try self.add("\\b"),
            9 => try self.add("\\t"),
            10 => try self.add("\\n"),
            11 => try self.add("\\v"),
            12 => try self.add("\\f"),
            13 => try self.add("\\r"),
            0...6, 14...31, 127 => {
                try self.add("\\x");
                try self.hex(code, 2);
            },
            // What Go calls not printable, as far as it is likely: C1 controls, blanks, joiners, marks.
            0x80...0xa0, 0xad, 0x1680, 0x2000...0x200f, 0x2028...0x202f, 0x205f...0x206f, 0x3000, 0xe000...0xf8ff, 0xfeff => {
                try self.add("\\u");
                try self.hex(code, 4);
            },
            else => {
                if (code == mark) try self.byte('\\');
                try self.add(raw);
            },
        }
    }

    fn hex(self: *Buffer, n: u32, comptime width: usize) Error!void {
        var digits: [width]u8 = undefined;
        var rest = n;
        var at: usize = width;
        while (at > 0) {
            at -= 1;
            digits[at] = "0123456789abcdef"[rest & 15];
            rest >>= 4;
        }
        try self.add(&digits);
    }

    /// A Unicode scalar value as UTF-8.
    pub fn utf8(self: *Buffer, code: u21) Error!void {
        var out: [4]u8 = undefined;
        const n = std.unicode.utf8Encode(code, &out) catch return self.add("\u{fffd}");
        try self.add(out[0..n]);
    }

    /// Standard base64 with padding.
    pub fn base64(self: *Buffer, s: []const u8) Error!void {
        const encoder = std.base64.standard.Encoder;
        const size = encoder.calcSize(s.len);
        _ = encoder.encode((try self.room(size))[0..size], s);
        self.len += size;
    }
};

pub const Rune = struct { code: u21, len: usize, valid: bool };

/// The first character of `s` (not empty). Like Go, a broken sequence counts as one byte.
pub fn rune(s: []const u8) Rune {
    const broken: Rune = .{ .code = 0xfffd, .len = 1, .valid = false };
    if (s[0] < 0x80) return .{ .code = s[0], .len = 1, .valid = true };
    const n = std.unicode.utf8ByteSequenceLength(s[0]) catch return broken;
    if (n > s.len) return broken;
    const code = std.unicode.utf8Decode(s[0..n]) catch return broken;
    return .{ .code = code, .len = n, .valid = true };
}

/// Whether ASCII strings are equal but for case.
pub fn sameWord(a: []const u8, b: []const u8) bool {
    return std.ascii.eqlIgnoreCase(a, b);
}
