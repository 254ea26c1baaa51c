//! The few keys of the network configuration (stdin) that the shim looks at, decoded as Go's encoding/json does.
//!
//! Go checks the syntax of the whole text first, matches keys without regard to case, lets the last of several equal
//! keys win, and passes over null. Its error texts are kept because runtimes log them and tests compare them.

const std = @import("std");
const text = @import("text.zig");
const Buffer = text.Buffer;

pub const Kind = enum {
    object,
    array,
    string,
    number,
    bool,
    null,

    fn of(first: u8) Kind {
        return switch (first) {
            '{' => .object,
            '[' => .array,
            '"' => .string,
            't', 'f' => .bool,
            'n' => .null,
            else => .number,
        };
    }
};

/// One key: the last value of the right type as it stands in the text, and the first type that was wrong.
pub const Slot = struct {
    key: []const u8,
    kind: Kind,
    raw: ?[]const u8 = null,
    wrong: ?Kind = null,
};

pub const Netconf = struct {
    name: Slot = .{ .key = "name", .kind = .string },
    version: Slot = .{ .key = "cniVersion", .kind = .string },
    socket_dir: Slot = .{ .key = "daemonSocketDir", .kind = .string },
    cni_dir: Slot = .{ .key = "cniDir", .kind = .string },
    log_file: Slot = .{ .key = "logFile", .kind = .string },
    log_level: Slot = .{ .key = "logLevel", .kind = .string },
    log_to_stderr: Slot = .{ .key = "logToStderr", .kind = .bool },
    log_options: Slot = .{ .key = "logOptions", .kind = .object },
    /// The type of the whole text when it is neither an object nor null.
    wrong: ?Kind = null,

    fn slots(self: *Netconf) [8]*Slot {
        return .{
            &self.name,     &self.version,   &self.socket_dir,    &self.cni_dir,
            &self.log_file, &self.log_level, &self.log_to_stderr, &self.log_options,
        };
    }
};

/// Reads `json`, which must have passed `syntax`.
pub fn parse(json: []const u8) text.Error!Netconf {
    var found: Netconf = .{};
    const at = skipBlanks(json, 0);
    switch (Kind.of(json[at])) {
        .object => {},
        .null => return found,
        else => |kind| {
            found.wrong = kind;
            return found;
        },
    }
    var members: Members = .of(json[at..]);
    while (try members.next()) |item| {
        for (found.slots()) |slot| {
            if (!sameKey(item.key, slot.key)) continue;
            const kind = Kind.of(item.value[0]);
            if (kind == slot.kind) {
                slot.raw = item.value;
            } else if (kind != .null and slot.wrong == null) {
                slot.wrong = kind;
            }
        }
    }
    return found;
}

/// The members of an object, in a text whose syntax is right.
pub const Members = struct {
    json: []const u8,
    at: usize = 1,
    unescaped: Buffer = .{},

    pub const Member = struct { key: []const u8, value: []const u8 };

    /// `json` begins with the object.
    pub fn of(json: []const u8) Members {
        return .{ .json = json };
    }

    /// The next one; its key is void with the one after it.
    pub fn next(self: *Members) text.Error!?Member {
        const start = nextOf(self.json, self.at) orelse return null;
        const key_end = skipValue(self.json, start);
        var key = self.json[start + 1 .. key_end - 1];
        if (std.mem.indexOfScalar(u8, key, '\\') != null) {
            self.unescaped.len = 0;
            try unquote(self.json[start..key_end], &self.unescaped);
            key = self.unescaped.bytes();
        }
        const value = skipBlanks(self.json, skipBlanks(self.json, key_end) + 1);
        self.at = skipValue(self.json, value);
        return .{ .key = key, .value = self.json[value..self.at] };
    }
};

/// The elements of an array, in a text whose syntax is right.
pub const Elements = struct {
    json: []const u8,
    at: usize = 1,

    /// `json` begins with the array.
    pub fn of(json: []const u8) Elements {
        return .{ .json = json };
    }

    pub fn next(self: *Elements) ?[]const u8 {
        const start = nextOf(self.json, self.at) orelse return null;
        self.at = skipValue(self.json, start);
        return self.json[start..self.at];
    }
};

/// Where the next member or element begins, null at the end of the object or array.
fn nextOf(json: []const u8, from: usize) ?usize {
    const at = skipBlanks(json, from);
    return switch (json[at]) {
        '}', ']' => null,
        ',' => skipBlanks(json, at + 1),
        else => at,
    };
}

/// The last value of `kind` that the object `json` has under `key`; null where there is none, or `json` is none.
pub fn member(json: []const u8, key: []const u8, kind: Kind) text.Error!?[]const u8 {
    const start = skipBlanks(json, 0);
    if (Kind.of(json[start]) != .object) return null;
    var found: ?[]const u8 = null;
    var members: Members = .of(json[start..]);
    while (try members.next()) |item| {
        if (sameKey(item.key, key) and Kind.of(item.value[0]) == kind) found = item.value;
    }
    return found;
}

/// As `member`, a string's content; "" where there is none.
pub fn stringMember(json: []const u8, key: []const u8) text.Error![]const u8 {
    const raw = try member(json, key, .string) orelse return "";
    // Nearly always: a buffer for each string of a long list would be a lot of memory.
    for (raw) |c| {
        if (c == '\\' or c >= 0x80) break;
    } else return raw[1 .. raw.len - 1];
    var out: Buffer = .{};
    try unquote(raw, &out);
    return out.bytes();
}

/// Go's folding: case, and the two characters outside ASCII whose simple folding lies inside (U+017F, U+212A).
fn sameKey(found: []const u8, wanted: []const u8) bool {
    var i: usize = 0;
    for (wanted) |w| {
        const want = std.ascii.toLower(w);
        if (want == 's' and std.mem.startsWith(u8, found[i..], "\u{17f}")) {
            i += 2;
        } else if (want == 'k' and std.mem.startsWith(u8, found[i..], "\u{212a}")) {
            i += 3;
        } else if (i < found.len and std.ascii.toLower(found[i]) == want) {
            i += 1;
        } else return false;
    }
    return i == found.len;
}

/// The string that `raw` (with its quotation marks) stands for. Lone surrogates and invalid UTF-8 become U+FFFD.
pub fn unquote(raw: []const u8, out: *Buffer) text.Error!void {
    const s = raw[1 .. raw.len - 1];
    var i: usize = 0;
    while (i < s.len) {
        if (s[i] != '\\') {
            const r = text.rune(s[i..]);
            try out.add(if (r.valid) s[i .. i + r.len] else "\u{fffd}");
            i += r.len;
            continue;
        }
        const c = s[i + 1];
        i += 2;
        if (c != 'u') {
            try out.byte(switch (c) {
                'b' => 8,
                'f' => 12,
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                else => c,
            });
            continue;
        }
        var code: u21 = hex4(s[i..]);
        i += 4;
        if (code >= 0xd800 and code < 0xdc00 and std.mem.startsWith(u8, s[i..], "\\u")) {
            const low: u21 = hex4(s[i + 2 ..]);
            if (low >= 0xdc00 and low < 0xe000) {
                code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
                i += 6;
            }
        }
        try out.utf8(code);
    }
}

fn hex4(s: []const u8) u16 {
    var code: u16 = 0;
    for (s[0..4]) |c| code = code << 4 | (std.fmt.charToDigit(c, 16) catch unreachable);
    return code;
}

fn skipBlanks(json: []const u8, from: usize) usize {
    var i = from;
    while (i < json.len and isBlank(json[i])) i += 1;
    return i;
}

fn isBlank(c: u8) bool {
    return c == ' ' or c == '\t' or c == '\n' or c == '\r';
}

/// The end of the value that begins at `from` in a text whose syntax is right.
fn skipValue(json: []const u8, from: usize) usize {
    var depth: usize = 0;
    var i = from;
    while (true) {
        switch (json[i]) {
            '"' => {
                i += 1;
                while (json[i] != '"') i += if (json[i] == '\\') 2 else 1;
                i += 1;
            },
            '{', '[' => {
                depth += 1;
                i += 1;
            },
            '}', ']' => {
                depth -= 1;
                i += 1;
            },
            ' ', '\t', '\n', '\r', ',', ':' => {
                i += 1;
                continue;
            },
            else => while (i < json.len and !isBlank(json[i]) and std.mem.indexOfScalar(u8, ",:]}", json[i]) == null) {
                i += 1;
            },
        }
        if (depth == 0) return i;
    }
}

/// What is wrong with a JSON text: the offending byte (null when the text ends too early) and Go's words for the place.
pub const Fault = struct {
    found: ?u8,
    place: []const u8 = "",

    pub fn describe(self: Fault, out: *Buffer) text.Error!void {
        const c = self.found orelse return out.add("unexpected end of JSON input");
        try out.add("invalid character '");
        var raw: Buffer = .{};
        try raw.utf8(c);
        if (c == '\'') try out.add("\\'") else try out.printable(c, raw.bytes(), '\'');
        try out.all(.{ "' ", self.place });
    }
};

/// As deep as Go's decoder goes.
const max_depth = 10_000;

/// Checks that `json` is exactly one JSON value; null when it is. Needs no recursion, so depth costs no stack.
pub fn syntax(json: []const u8) ?Fault {
    const Expect = enum { value, value_or_end, key, key_or_end, colon, comma_in_object, comma_in_array, nothing };
    var scan: Scan = .{ .json = json };
    var expect: Expect = .value;
    var objects: [max_depth / 8 + 1]u8 = undefined;
    var depth: usize = 0;
    while (true) {
        scan.at = skipBlanks(json, scan.at);
        if (scan.at == json.len) return if (expect == .nothing) null else .{ .found = null };
        const c = json[scan.at];
        var closed = false;
        switch (expect) {
            .value, .value_or_end => switch (c) {
                '{', '[' => {
                    if (depth == max_depth) return .{ .found = c, .place = "exceeded max depth" };
                    const bit = @as(u8, 1) << @intCast(depth % 8);
                    if (c == '{') objects[depth / 8] |= bit else objects[depth / 8] &= ~bit;
                    depth += 1;
                    scan.at += 1;
                    expect = if (c == '{') .key_or_end else .value_or_end;
                    continue;
                },
                ']' => if (expect == .value_or_end) {
                    closed = true;
                } else return .{ .found = c, .place = looking_for_value },
                else => if (scan.scalar()) |fault| return fault,
            },
            .key, .key_or_end => {
                if (c == '}' and expect == .key_or_end) {
                    closed = true;
                } else {
                    if (c != '"') return .{ .found = c, .place = "looking for beginning of object key string" };
                    if (scan.string()) |fault| return fault;
                    expect = .colon;
                    continue;
                }
            },
            .colon => {
                if (c != ':') return .{ .found = c, .place = "after object key" };
                scan.at += 1;
                expect = .value;
                continue;
            },
            .comma_in_object => switch (c) {
                ',' => {
                    scan.at += 1;
                    expect = .key;
                    continue;
                },
                '}' => closed = true,
                else => return .{ .found = c, .place = "after object key:value pair" },
            },
            .comma_in_array => switch (c) {
                ',' => {
                    scan.at += 1;
                    expect = .value;
                    continue;
                },
                ']' => closed = true,
                else => return .{ .found = c, .place = "after array element" },
            },
            .nothing => return .{ .found = c, .place = "after top-level value" },
        }
        if (closed) {
            scan.at += 1;
            depth -= 1;
        }
        if (depth == 0) {
            expect = .nothing;
        } else {
            const inside = depth - 1;
            expect = if (objects[inside / 8] >> @intCast(inside % 8) & 1 == 1) .comma_in_object else .comma_in_array;
        }
    }
}

const looking_for_value = "looking for beginning of value";

const Scan = struct {
    json: []const u8,
    at: usize = 0,

    fn peek(self: *const Scan) ?u8 {
        return if (self.at < self.json.len) self.json[self.at] else null;
    }

    /// Inside a token Go takes the end of the text for a blank.
    fn next(self: *const Scan) u8 {
        return self.peek() orelse ' ';
    }

    fn scalar(self: *Scan) ?Fault {
        return switch (self.json[self.at]) {
            '"' => self.string(),
            '-', '0'...'9' => self.number(),
            't' => self.literal("true"),
            'f' => self.literal("false"),
            'n' => self.literal("null"),
            else => |c| .{ .found = c, .place = looking_for_value },
        };
    }

    fn literal(self: *Scan, comptime word: []const u8) ?Fault {
        inline for (word) |want| {
            const c = self.next();
            if (c != want) return .{ .found = c, .place = "in literal " ++ word ++ " (expecting '" ++ [1]u8{want} ++ "')" };
            self.at += 1;
        }
        return null;
    }

    fn digits(self: *Scan, place: []const u8) ?Fault {
        const first = self.next();
        if (!std.ascii.isDigit(first)) return .{ .found = first, .place = place };
        while (self.peek()) |c| : (self.at += 1) if (!std.ascii.isDigit(c)) break;
        return null;
    }

    fn number(self: *Scan) ?Fault {
        if (self.peek() == '-') self.at += 1;
        if (self.peek() == '0') {
            self.at += 1;
        } else if (self.digits("in numeric literal")) |fault| return fault;
        if (self.peek() == '.') {
            self.at += 1;
            if (self.digits("after decimal point in numeric literal")) |fault| return fault;
        }
        if (self.peek() == 'e' or self.peek() == 'E') {
            self.at += 1;
            if (self.peek() == '+' or self.peek() == '-') self.at += 1;
            if (self.digits("in exponent of numeric literal")) |fault| return fault;
        }
        return null;
    }

    fn string(self: *Scan) ?Fault {
        self.at += 1;
        while (self.peek()) |c| {
            self.at += 1;
            switch (c) {
                '"' => return null,
                '\\' => if (self.escape()) |fault| return fault,
                0...31 => return .{ .found = c, .place = "in string literal" },
                else => {},
            }
        }
        return .{ .found = null };
    }

    fn escape(self: *Scan) ?Fault {
        const c = self.next();
        self.at += 1;
        switch (c) {
            'b', 'f', 'n', 'r', 't', '\\', '/', '"' => return null,
            'u' => {},
            else => return .{ .found = c, .place = "in string escape code" },
        }
        for (0..4) |_| {
            const digit = self.next();
            if (!std.ascii.isHex(digit)) return .{ .found = digit, .place = "in \\u hexadecimal character escape" };
            self.at += 1;
        }
        return null;
    }
};
