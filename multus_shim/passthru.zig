//! passthru: does nothing and says so. The first plugin of the auxiliary chain; this program is it under that name.
//!
//! Upstream's image has such a program and puts it on every node. Nobody needs it beside our daemon, which has the plugin
//! built in; whoever takes a node over later, or wants binaries only (`builtinPlugins`), does.

const std = @import("std");
const answer = @import("answer.zig");
const checks = @import("checks.zig");
const text = @import("text.zig");

/// Whether the program was called by this plugin's name.
pub fn isNameOf(program: []const u8) bool {
    return std.mem.eql(u8, std.fs.path.basename(program), "passthru");
}

/// An empty result for ADD, nothing for the other verbs. `version`: of the configuration.
pub fn finish(verb: checks.Verb, version: []const u8) text.Error!noreturn {
    if (verb != .ADD) answer.exit(0);
    var out: text.Buffer = .{};
    try out.add("{\"cniVersion\":");
    try out.json(version);
    // A result before 1.0.0 always has the member.
    const dns = if (version.len > 0 and version[0] == '0') ",\"dns\":{}}" else "}";
    try out.add(dns);
    answer.finish(out.bytes(), 0);
}
