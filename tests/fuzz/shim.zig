//! libFuzzer's entry into the shim: what comes from the daemon (an HTTP reply) and from the runtime (stdin).
//!
//! Compiled beside copies of the shim's sources, with their safety checks: a failed one ends the process.

const std = @import("std");
const linux = std.os.linux;
const daemon = @import("daemon.zig");
const netconf = @import("netconf.zig");
const text = @import("text.zig");

export fn LLVMFuzzerTestOneInput(data: [*]const u8, len: usize) c_int {
    if (len == 0) return 0;
    const bytes = data[1..len];
    (if (data[0] % 2 == 0) reply(bytes) else config(bytes)) catch @panic("out of memory");
    return 0;
}

/// A daemon that says `bytes` and hangs up.
fn reply(bytes: []const u8) text.Error!void {
    var pair: [2]i32 = undefined;
    if (linux.errno(linux.socketpair(linux.AF.UNIX, linux.SOCK.STREAM, 0, &pair)) != .SUCCESS) @panic("no socket");
    defer for (pair) |fd| {
        _ = linux.close(fd);
    };
    if (linux.sendto(pair[1], bytes.ptr, bytes.len, linux.MSG.NOSIGNAL, null, 0) != bytes.len) @panic("not sent whole");
    _ = linux.shutdown(pair[1], linux.SHUT.WR);
    var out: text.Buffer = .{};
    defer free(&out);
    switch (try daemon.exchange(pair[0], "", "", .in(10_000))) {
        .late => @panic("the end of the reply was not seen"),
        .broken, .cut => |why| try quoted(why, &out),
        .reply => |whole| {
            if (whole.body.len > bytes.len) @panic("a body that was not sent");
            _ = whole.forStdout();
            try daemon.excerpt(&out, whole.status_line);
            try daemon.excerpt(&out, whole.content_type);
            try daemon.excerpt(&out, whole.body);
        },
    }
}

/// A runtime that writes `bytes` to stdin.
fn config(bytes: []const u8) text.Error!void {
    var out: text.Buffer = .{};
    defer free(&out);
    try quoted(bytes, &out);
    if (netconf.syntax(bytes)) |fault| return fault.describe(&out);
    const found = try netconf.parse(bytes);
    for ([_]netconf.Slot{ found.name, found.version, found.socket_dir, found.cni_dir }) |slot| {
        out.len = 0;
        try netconf.unquote(slot.raw orelse continue, &out);
        if (!std.unicode.utf8ValidateSlice(out.bytes())) @panic("a string that is not UTF-8");
    }
}

/// What an error object would be made of must be JSON.
fn quoted(bytes: []const u8, out: *text.Buffer) text.Error!void {
    try out.json(bytes);
    if (netconf.syntax(out.bytes()) != null) @panic("an error that is not JSON");
}

fn free(buffer: *text.Buffer) void {
    if (buffer.area.len > 0) _ = linux.munmap(buffer.area.ptr, buffer.area.len);
}
