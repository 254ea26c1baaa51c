//! Answers of upstream's daemon, which knows nothing of `stdout_type`: what the runtime is to see of them.
//!
//! It answers an ADD with `{"Result": {...}}`, always of the newest version, and leaves it to its client to tell it in
//! the version that was asked for; a failure is a CNI error or, mostly, plain text. So it is where upstream's daemon
//! is put back on a node and this shim has not been replaced yet.
//!
//! Conversions: those of containernetworking/cni `pkg/types/internal/convert.go`. 1.0.0 and 1.1.0 get the result as it
//! stands; 0.3.0 to 0.4.0 know less of an interface, and say an address' family; 0.1.0 and 0.2.0 have one address of
//! each family.

const std = @import("std");
const netconf = @import("netconf.zig");
const text = @import("text.zig");
const Buffer = text.Buffer;

/// A result for stdout, or why there is none.
pub const Converted = union(enum) { result: []const u8, no_result, wrong: []const u8 };

/// The result in `body` in the CNI version `asked`.
pub fn convert(body: []const u8, asked: []const u8) text.Error!Converted {
    if (netconf.syntax(body) != null) return .no_result;
    const found = try netconf.member(body, "Result", .object) orelse return .no_result;
    const version = try netconf.stringMember(found, "cniVersion");
    if (!isAnyOf(version, &.{ "", "1.0.0", "1.1.0" })) {
        var why: Buffer = .{};
        try why.add("the result of upstream's daemon is of CNI version ");
        try why.quote(version);
        try why.add(", and one of 1.0.0 or 1.1.0 is known to come from it");
        return .{ .wrong = why.bytes() };
    }
    var out: Buffer = .{};
    try out.add("{\"cniVersion\":");
    try out.json(asked);
    if (isAnyOf(asked, &.{ "1.0.0", "1.1.0" })) {
        try rest(&out, found);
    } else if (isAnyOf(asked, &.{ "0.1.0", "0.2.0" })) {
        if (!try families(&out, found)) return .{
            .wrong = "cannot convert: no valid IP addresses; a result of CNI version 0.1.0 or 0.2.0 must have one",
        };
    } else {
        try lists(&out, found);
    }
    try out.byte('}');
    return .{ .result = out.bytes() };
}

fn isAnyOf(word: []const u8, words: []const []const u8) bool {
    for (words) |known| if (std.mem.eql(u8, word, known)) return true;
    return false;
}

/// Adds every member of `result` but its version.
fn rest(out: *Buffer, result: []const u8) text.Error!void {
    var members: netconf.Members = .of(result);
    while (try members.next()) |item| {
        if (text.sameWord(item.key, "cniVersion")) continue;
        try out.byte(',');
        try out.json(item.key);
        try out.all(.{ ":", item.value });
    }
}

/// Adds the members of a result of version 0.3.0 to 0.4.0.
fn lists(out: *Buffer, result: []const u8) text.Error!void {
    if (try netconf.member(result, "interfaces", .array)) |raw| {
        try out.add(",\"interfaces\":[");
        var interfaces: netconf.Elements = .of(raw);
        while (interfaces.next()) |interface| {
            try separate(out);
            try out.byte('{');
            try some(out, interface, &.{ "name", "mac", "sandbox" });
            try out.byte('}');
        }
        try out.byte(']');
    }
    if (try netconf.member(result, "ips", .array)) |raw| {
        try out.add(",\"ips\":[");
        var addresses: netconf.Elements = .of(raw);
        while (addresses.next()) |address| {
            try separate(out);
            const version = if (isIpv4(try netconf.stringMember(address, "address"))) "4" else "6";
            try out.all(.{ "{\"version\":\"", version, "\"" });
            try some(out, address, &.{ "interface", "address", "gateway" });
            try out.byte('}');
        }
        try out.byte(']');
    }
    if (try netconf.member(result, "routes", .array)) |raw| try out.all(.{ ",\"routes\":", raw });
    try dns(out, result);
}

/// Adds the members of a result of version 0.1.0 or 0.2.0: of each family the first address; false without any.
fn families(out: *Buffer, result: []const u8) text.Error!bool {
    var has_any = false;
    for ([_]bool{ true, false }) |ipv4| {
        var addresses: netconf.Elements = .of(try netconf.member(result, "ips", .array) orelse "[]");
        while (addresses.next()) |address| {
            const cidr = try netconf.stringMember(address, "address");
            if (cidr.len == 0 or isIpv4(cidr) != ipv4) continue;
            try out.all(.{ ",\"", if (ipv4) "ip4" else "ip6", "\":{\"ip\":" });
            try out.json(cidr);
            try some(out, address, &.{"gateway"});
            try routes(out, result, ipv4);
            try out.byte('}');
            has_any = true;
            break;
        }
    }
    try dns(out, result);
    return has_any;
}

fn routes(out: *Buffer, result: []const u8, ipv4: bool) text.Error!void {
    var all: netconf.Elements = .of(try netconf.member(result, "routes", .array) orelse return);
    var begun = false;
    while (all.next()) |route| {
        if (isIpv4(try netconf.stringMember(route, "dst")) != ipv4) continue;
        try out.add(if (begun) ",{" else ",\"routes\":[{");
        begun = true;
        try some(out, route, &.{ "dst", "gw" });
        try out.byte('}');
    }
    if (begun) try out.byte(']');
}

fn dns(out: *Buffer, result: []const u8) text.Error!void {
    try out.all(.{ ",\"dns\":", try netconf.member(result, "dns", .object) orelse "{}" });
}

/// Adds those members of `object` that `keys` name, in their order.
fn some(out: *Buffer, object: []const u8, keys: []const []const u8) text.Error!void {
    for (keys) |key| {
        const value = try netconf.member(object, key, .string) orelse try netconf.member(object, key, .number) orelse continue;
        try separate(out);
        try out.all(.{ "\"", key, "\":", value });
    }
}

fn separate(out: *Buffer) text.Error!void {
    const last = out.bytes()[out.len - 1];
    if (last != '{' and last != '[') try out.byte(',');
}

fn isIpv4(address: []const u8) bool {
    return std.mem.indexOfScalar(u8, address, ':') == null;
}

/// A CNI error as a daemon may answer it.
pub const Failure = struct { code: u64, msg: []const u8, details: []const u8 };

/// As much of a plain text as becomes an error's message.
const max_text = 64 * 1024;

/// The failure in the body of a 400: a CNI error in JSON, or plain text. Null for anything else.
pub fn failure(content_type: []const u8, body: []const u8) text.Error!?Failure {
    const end = std.mem.indexOfScalar(u8, content_type, ';') orelse content_type.len;
    const media_type = std.mem.trim(u8, content_type[0..end], " \t");
    if (text.sameWord(media_type, "application/json")) {
        if (netconf.syntax(body) != null) return null;
        const msg = try netconf.stringMember(body, "msg");
        if (msg.len == 0) return null;
        const code = try netconf.member(body, "code", .number) orelse "";
        return .{
            .code = std.fmt.parseInt(u32, code, 10) catch 999,
            .msg = msg,
            .details = try netconf.stringMember(body, "details"),
        };
    }
    if (!text.sameWord(media_type, "text/plain")) return null;
    const words = std.mem.trim(u8, body, " \t\r\n");
    return if (words.len == 0) null else .{ .code = 999, .msg = words[0..@min(words.len, max_text)], .details = "" };
}
