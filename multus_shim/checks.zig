//! What a CNI plugin refuses before it does anything, in the order and the words of upstream's plugin skeleton.
//!
//! Conformance tests and runtimes see these messages, so their wording is part of the interface.

const std = @import("std");
const answer = @import("answer.zig");
const netconf = @import("netconf.zig");
const text = @import("text.zig");
const Buffer = text.Buffer;

/// CNI versions, oldest first; a configuration without cniVersion has the first.
pub const versions = [_][]const u8{ "0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0" };

pub const Verb = enum { ADD, DEL, CHECK, STATUS, GC };

/// The process environment.
pub const Environment = struct {
    block: [:null]const ?[*:0]const u8,

    /// The value of a variable, "" when it is not set. Of several with one name the first counts.
    pub fn get(self: Environment, name: []const u8) [:0]const u8 {
        for (self.block) |entry| {
            const line = std.mem.span(entry.?);
            if (line.len > name.len and line[name.len] == '=' and std.mem.startsWith(u8, line, name)) return line[name.len + 1 ..];
        }
        return "";
    }

    /// Adds the CNI_* variables, and those of a trace, as members of a JSON object.
    pub fn cniMembers(self: Environment, out: *Buffer) text.Error!void {
        var first = true;
        for (self.block, 0..) |entry, i| {
            const line = std.mem.span(entry.?);
            if (!std.mem.startsWith(u8, line, "CNI_") and !isOfTrace(line)) continue;
            const eq = std.mem.indexOfScalar(u8, line, '=') orelse continue;
            if (self.seenBefore(i, line[0 .. eq + 1])) continue;
            if (!first) try out.byte(',');
            first = false;
            try out.json(line[0..eq]);
            try out.byte(':');
            try out.json(line[eq + 1 ..]);
        }
    }

    fn seenBefore(self: Environment, index: usize, start: []const u8) bool {
        for (self.block[0..index]) |entry| if (std.mem.startsWith(u8, std.mem.span(entry.?), start)) return true;
        return false;
    }
};

/// Bytes of a variable's value, the most that W3C asks programs to pass on; a longer one is left out.
const max_of_trace = 8192;

/// Whether the variable is one by which a caller passes its trace context on, as libcni does.
fn isOfTrace(line: []const u8) bool {
    inline for ([_][]const u8{ "TRACEPARENT=", "TRACESTATE=", "BAGGAGE=" }) |start|
        if (std.mem.startsWith(u8, line, start)) return line.len - start.len <= max_of_trace;
    return false;
}

const Needs = std.EnumSet(Verb);
const all: Needs = .full;
const pod: Needs = .initMany(&.{ .ADD, .DEL, .CHECK });
const namespace: Needs = .initMany(&.{ .ADD, .CHECK });

const Variable = struct { name: []const u8, needed: Needs, validate: ?*const fn ([]const u8) void = null };

const variables = [_]Variable{
    .{ .name = "CNI_CONTAINERID", .needed = pod, .validate = containerId },
    .{ .name = "CNI_NETNS", .needed = namespace },
    .{ .name = "CNI_IFNAME", .needed = pod, .validate = interfaceName },
    .{ .name = "CNI_PATH", .needed = all },
};

/// Refuses an environment in which a variable that the verb needs has a wrong value (at once) or is missing (all
/// missing ones in one message).
pub fn environment(env: Environment, verb: Verb) void {
    var missing: Buffer = .{};
    for (variables) |variable| {
        if (!variable.needed.contains(verb)) continue;
        const value = env.get(variable.name);
        if (value.len == 0) {
            missing.all(.{ if (missing.len > 0) "," else "", variable.name }) catch answer.outOfMemory();
        } else if (variable.validate) |validate| validate(value);
    }
    if (missing.len > 0)
        answer.refuse(.bad_environment, .{
            "required env variables [", missing.bytes(), "] missing",
        }, "");
}

/// `^[a-zA-Z0-9][a-zA-Z0-9_.\-]*$`
fn isIdentifier(s: []const u8) bool {
    for (s, 0..) |c, i| switch (c) {
        'a'...'z', 'A'...'Z', '0'...'9' => {},
        '_', '.', '-' => if (i == 0) return false,
        else => return false,
    };
    return s.len > 0;
}

fn containerId(id: []const u8) void {
    if (!isIdentifier(id)) answer.refuse(.bad_environment, .{"invalid characters in containerID"}, id);
}

fn interfaceName(name: []const u8) void {
    if (name.len > 15)
        answer.refuse(.bad_environment, .{"interface name is too long"}, "interface name should be less than 16 characters");
    if (std.mem.eql(u8, name, ".") or std.mem.eql(u8, name, ".."))
        answer.refuse(.bad_environment, .{"interface name is . or .."}, "");
    var i: usize = 0;
    while (i < name.len) {
        const r = text.rune(name[i..]);
        i += r.len;
        switch (r.code) {
            '/', ':', '\t'...'\r', ' ', 0x85, 0xa0, 0x1680, 0x2000...0x200a, 0x2028, 0x2029, 0x202f, 0x205f, 0x3000 => {
                answer.refuse(.bad_environment, .{"interface name contains / or : or whitespace characters"}, "");
            },
            else => {},
        }
    }
    if (std.mem.indexOfScalar(u8, name, '%') != null)
        answer.refuse(.bad_environment, .{"interface name contains %, which the kernel replaces with a number"}, "");
}

/// Refuses a configuration that is not a JSON object with a proper network name.
pub fn config(json: []const u8) netconf.Netconf {
    if (netconf.syntax(json)) |fault| {
        var why: Buffer = .{};
        fault.describe(&why) catch answer.outOfMemory();
        answer.refuse(.undecodable, .{ "error unmarshall network config: ", why.bytes() }, "");
    }
    const conf = netconf.parse(json) catch answer.outOfMemory();
    const trouble = "error unmarshall network config: json: cannot unmarshal ";
    if (conf.wrong) |kind|
        answer.refuse(.undecodable, .{
            trouble, @tagName(kind), " into Go value of type struct { Name string \"json:\\\"name\\\"\" }",
        }, "");
    if (conf.name.wrong) |kind|
        answer.refuse(.undecodable, .{ trouble, @tagName(kind), " into Go struct field .name of type string" }, "");
    const name = string(&conf.name);
    if (name.len == 0) answer.refuse(.bad_config, .{"missing network name"}, "");
    if (!isIdentifier(name)) answer.refuse(.bad_config, .{"invalid characters found in network name"}, name);
    return conf;
}

/// The string in `slot`, "" when there is none.
pub fn string(slot: *const netconf.Slot) []const u8 {
    const raw = slot.raw orelse return "";
    var out: Buffer = .{};
    netconf.unquote(raw, &out) catch answer.outOfMemory();
    return out.bytes();
}

/// The configuration's cniVersion.
pub fn askedVersion(conf: *const netconf.Netconf) []const u8 {
    const given = string(&conf.version);
    return if (given.len == 0) versions[0] else given;
}

const Version = [3]i64;

/// Refuses a cniVersion that does not know the verb, or that this plugin does not know.
pub fn version(conf: *const netconf.Netconf, verb: Verb) void {
    if (conf.version.wrong) |kind| answer.refuse(.undecodable, .{
        "decoding version from network config: json: cannot unmarshal ",
        @tagName(kind),
        " into Go struct field .cniVersion of type string",
    }, "");
    const asked = askedVersion(conf);
    const least: ?Version = switch (verb) {
        .ADD, .DEL => null,
        .CHECK => .{ 0, 4, 0 },
        .STATUS, .GC => .{ 1, 1, 0 },
    };
    if (least) |wanted| {
        const number = numbers(asked);
        if (older(number, wanted))
            answer.refuse(.incompatible_version, .{
                "config version does not allow ", @tagName(verb),
            }, "");
        if (older(.{ 1, 1, 0 }, number)) answer.refuse(.incompatible_version, .{ "plugin version does not allow ", @tagName(verb) }, "");
    }
    for (versions) |known| if (std.mem.eql(u8, known, asked)) return;
    var details: Buffer = .{};
    incompatible(&details, asked) catch answer.outOfMemory();
    answer.refuse(.incompatible_version, .{"incompatible CNI versions"}, details.bytes());
}

fn incompatible(out: *Buffer, asked: []const u8) text.Error!void {
    try out.add("config is ");
    try out.quote(asked);
    try out.add(", plugin supports ");
    for (versions, 0..) |known, i| {
        try out.byte(if (i == 0) '[' else ' ');
        try out.quote(known);
    }
    try out.byte(']');
}

fn older(a: Version, b: Version) bool {
    for (a, b) |x, y| if (x != y) return x < y;
    return false;
}

fn numbers(s: []const u8) Version {
    var out: Version = .{ 0, 0, 0 };
    var quoted: Buffer = .{};
    var parts = std.mem.splitScalar(u8, s, '.');
    var n: usize = 0;
    while (parts.next()) |_| n += 1;
    if (n > out.len) {
        quoted.quote(s) catch answer.outOfMemory();
        answer.refuse(.undecodable, .{ "invalid version ", quoted.bytes(), ": too many parts" }, "");
    }
    parts.reset();
    for (&out, [_][]const u8{ "major", "minor", "micro" }) |*to, which| {
        const part = parts.next() orelse break;
        to.* = parse(part) catch |e| {
            quoted.quote(part) catch answer.outOfMemory();
            const why = if (e == error.Overflow) ": value out of range" else ": invalid syntax";
            const q = quoted.bytes();
            answer.refuse(.undecodable, .{
                "failed to convert ", which, " version part ", q, ": strconv.Atoi: parsing ", q, why,
            }, "");
        };
    }
    return out;
}

/// Decimal digits with an optional sign.
fn parse(s: []const u8) error{ Overflow, Syntax }!i64 {
    const signed = s.len > 0 and (s[0] == '-' or s[0] == '+');
    const digits = s[@intFromBool(signed)..];
    if (digits.len == 0) return error.Syntax;
    for (digits) |c| if (!std.ascii.isDigit(c)) return error.Syntax;
    var n: i64 = 0;
    for (digits) |c| {
        n = std.math.mul(i64, n, 10) catch return error.Overflow;
        n = std.math.add(i64, n, c - '0') catch return error.Overflow;
    }
    return if (s[0] == '-') -n else n;
}
