//! What the container runtime sees: stdout and the exit code.
//!
//! https://www.cni.dev/docs/spec/#error - a failure is one JSON object on stdout and exit code 1. Upstream's form is
//! kept: four spaces of indentation, no newline at the end, no "details" when there are none.

const std = @import("std");
const linux = std.os.linux;
const log = @import("log.zig");
const sys = @import("sys.zig");
const text = @import("text.zig");

/// CNI error codes: 1-99 from the specification, 999 is upstream's "internal".
pub const Code = enum(u16) {
    incompatible_version = 1,
    bad_environment = 4,
    io_failure = 5,
    undecodable = 6,
    bad_config = 7,
    bad_netns = 8,
    try_again = 11,
    unavailable = 50,
    internal = 999,
};

/// A runtime that does not take the answer within this time gets none.
const output_ms = @import("build_options").deadlines.stdout_ms;

/// Whether bytes were sent to stdout: a second JSON object behind them would make both unreadable.
var begun = false;

pub fn exit(status: u8) noreturn {
    linux.exit_group(status);
}

/// Prints `bytes` on stdout, logs how the call went and ends: with `status`, or with 1 when they could not be written.
pub fn finish(bytes: []const u8, status: u8) noreturn {
    begun = begun or bytes.len > 0;
    const taken = sys.writeAll(1, bytes, .in(output_ms));
    const reached = if (taken) status else 1;
    log.ended(bytes, reached, taken);
    exit(reached);
}

/// A remark on stderr; whether anybody reads it does not matter.
pub fn remark(bytes: []const u8) void {
    _ = sys.writeAll(2, bytes, .in(1000));
}

/// Ends with a CNI error whose message is made of `parts` (strings and numbers).
pub fn refuse(code: Code, parts: anytype, details: []const u8) noreturn {
    var msg: text.Buffer = .{};
    msg.all(parts) catch outOfMemory();
    refuseWith(code, msg.bytes(), details);
}

pub fn refuseWith(code: Code, msg: []const u8, details: []const u8) noreturn {
    fail(numberOf(code), msg, details);
}

/// Ends with a CNI error whose code may be any plugin's.
pub fn fail(code: u64, msg: []const u8, details: []const u8) noreturn {
    var out: text.Buffer = .{};
    compose(&out, code, msg, details) catch outOfMemory();
    finish(out.bytes(), 1);
}

fn compose(out: *text.Buffer, code: u64, msg: []const u8, details: []const u8) text.Error!void {
    try out.all(.{ "{\n    \"code\": ", code, ",\n    \"msg\": " });
    try out.json(msg);
    if (details.len > 0) {
        try out.add(",\n    \"details\": ");
        try out.json(details);
    }
    try out.add("\n}");
}

fn numberOf(code: Code) u64 {
    return switch (code) {
        inline else => |c| @backingInt(c),
    };
}

pub fn outOfMemory() noreturn {
    last("multus-shim: out of memory; does the container runtime run with a memory or address space limit?");
}

/// The end of a program fault, in place of a stack trace: the runtime still gets a CNI error.
pub fn panicked(message: []const u8, _: ?usize) noreturn {
    @branchHint(.cold);
    var line: [160]u8 = undefined;
    const head = "multus-shim failed inside; please report this: ";
    const n = @min(message.len, line.len - head.len);
    @memcpy(line[0..head.len], head);
    for (line[head.len..][0..n], message[0..n]) |*to, c| to.* = if (c < ' ' or c > '~' or c == '"' or c == '\\') '?' else c;
    last(line[0 .. head.len + n]);
}

/// An error without any memory but the stack. `msg` needs no escapes.
fn last(msg: []const u8) noreturn {
    if (begun) exit(1);
    begun = true;
    for ([_][]const u8{ "{\n    \"code\": 999,\n    \"msg\": \"", msg, "\"\n}" }) |piece| {
        if (!sys.writeAll(1, piece, .in(output_ms))) break;
    }
    exit(1);
}
