//! multus-shim: the CNI plugin that the container runtime executes, in place of the multus daemon that does the work.
//!
//! It checks what every CNI plugin checks (checks.zig), sends its CNI_* variables, those of its caller's trace and its
//! stdin to the daemon in one HTTP request over a unix socket (daemon.zig), and copies the answer to stdout. It makes no
//! decision but one: a DEL that the daemon cannot take is kept for it on disk (spool.zig).
//!
//! Request: `POST /cni` with `Accept: application/vnd.multus.cni-stdout` and the body
//! `{"env":{"CNI_...":"..."},"config":"<standard base64 of stdin>"}`.
//!
//! Reply: its body goes to stdout as it stands when its Content-Type is the accepted one, with exit code 0 for status
//! 200 and 1 for any other. For verbs other than ADD an empty 200 of any type is success. What upstream's daemon answers
//! is converted (result.zig). Everything else is reported as CNI error 999 with an excerpt of what was seen.
//!
//! A daemon that stops hands over to its successor: it answers 503, or its connection ends before the reply does. Then
//! the request is sent again, a few times at most and within the same deadlines: a repeated ADD or DEL is harmless, also
//! where the first one was begun or done.
//!
//! Keys of the network configuration that are read here (the daemon gets all of them; case does not matter):
//!
//! | key                | default                 | meaning                                                         |
//! | ------------------ | ----------------------- | --------------------------------------------------------------- |
//! | name, cniVersion   |                         | checked as the CNI specification asks                           |
//! | daemonSocketDir    | /run/multus/            | directory of multus.sock                                        |
//! | cniDir             | /var/lib/cni/multus     | its `spool` directory keeps DELs that the daemon could not take |
//! | logFile, logLevel, | no file, error, false,  | the shim's own log (log.zig)                                    |
//! | logToStderr,       | 100 MB                  |                                                                 |
//! | logOptions.maxSize |                         |                                                                 |
//!
//! Nothing waits for ever. The times are those of `deadlines` below, which `multus_daemon/deadlines.py` sets:
//!
//! | verb           | daemon does not listen                      | daemon does not answer in time                     |
//! | -------------- | ------------------------------------------- | -------------------------------------------------- |
//! | ADD, CHECK, GC | tries for daemon_wait, then code 11         | code 11 after reply                                |
//! | STATUS         | one attempt, code 50                        | code 50 after status_reply                         |
//! | DEL            | tries for del_wait, then spooled: exit 0    | spooled after del_reply, and when the reply is not |
//! |                |                                             | HTTP or always cut off: exit 0                     |
//!
//! stdin has to arrive within `stdin` and stdout to be taken within `stdout`.
//!
//! Called as `passthru` it is that plugin (passthru.zig) and talks to nobody.

const std = @import("std");
const linux = std.os.linux;
const answer = @import("answer.zig");
const checks = @import("checks.zig");
const daemon = @import("daemon.zig");
const log = @import("log.zig");
const netconf = @import("netconf.zig");
const passthru = @import("passthru.zig");
const results = @import("result.zig");
const spool = @import("spool.zig");
const sys = @import("sys.zig");
const text = @import("text.zig");
const Buffer = text.Buffer;
const Verb = checks.Verb;

const build_options = @import("build_options");
const release = build_options.version;
/// From `multus_daemon/deadlines.py`, which says why; `reply_ms` is SHIM_REPLY_SECONDS there.
const deadlines = build_options.deadlines;

pub const panic = std.debug.FullPanic(answer.panicked);
pub const std_options: std.Options = .{ .enable_segfault_handler = false, .signal_stack_size = null };

const max_stdin = 16 * 1024 * 1024;

const default_socket_dir = "/run/multus/";
const default_cni_dir = "/var/lib/cni/multus";
/// The status of a daemon that stops and has left the request untouched.
const handed_over = 503;
/// How often a request is sent again to a successor, and the pause before, which doubles.
const most_repeats = 6;
const repeat_pause_ms = 10;

pub fn main(init: std.process.Init.Minimal) void {
    sys.guardStandardDescriptors();
    sys.ignoreBrokenPipes();
    run(init) catch answer.outOfMemory();
}

fn run(init: std.process.Init.Minimal) text.Error!noreturn {
    for (init.args.vector[@min(1, init.args.vector.len)..]) |argument| {
        for ([_][]const u8{ "--version", "-version", "-v" }) |flag|
            if (std.mem.eql(u8, std.mem.span(argument), flag)) answer.finish("multus-shim: version " ++ release ++ "\n", 0);
    }
    const env: checks.Environment = .{ .block = init.environ.block.slice };
    const command = env.get("CNI_COMMAND");
    if (command.len == 0) try about();
    if (std.mem.eql(u8, command, "VERSION")) try version();

    const known = std.meta.stringToEnum(Verb, command);
    if (known) |verb| checks.environment(env, verb);
    const stdin = readStdin();
    const conf = checks.config(stdin);
    try log.configure(&conf, command, env.get("CNI_CONTAINERID"), env.get("CNI_IFNAME"));
    const verb = known orelse answer.refuse(.bad_environment, .{ "unknown CNI_COMMAND: ", command }, "");
    checks.version(&conf, verb);
    const arguments = init.args.vector;
    if (arguments.len > 0 and passthru.isNameOf(std.mem.span(arguments[0]))) {
        if (verb == .ADD or verb == .DEL) refuseOwnNetns(env);
        const version_of = checks.string(&conf.version);
        try passthru.finish(verb, if (version_of.len == 0) checks.versions[0] else version_of);
    }
    const call = try Call.prepare(verb, env, stdin, &conf);
    if (verb == .ADD or verb == .DEL) refuseOwnNetns(env);
    try call.make();
}

/// Somebody calls the plugin by hand.
fn about() text.Error!noreturn {
    var out: Buffer = .{};
    try out.add("multus-shim " ++ release ++ ": meta-plugin that hands CNI requests to the multus daemon of this node\n");
    try out.add("CNI protocol versions supported: ");
    for (checks.versions, 0..) |v, i| try out.all(.{ if (i == 0) "" else ", ", v });
    try out.byte('\n');
    answer.remark(out.bytes());
    answer.exit(0);
}

fn version() text.Error!noreturn {
    var out: Buffer = .{};
    try out.all(.{ "{\"cniVersion\":\"", checks.versions[checks.versions.len - 1], "\",\"supportedVersions\":[" });
    for (checks.versions, 0..) |v, i| try out.all(.{ if (i == 0) "\"" else ",\"", v, "\"" });
    try out.add("]}\n");
    answer.finish(out.bytes(), 0);
}

fn readStdin() []const u8 {
    var stdin: Buffer = .{};
    const trouble = "error reading from stdin: ";
    switch (sys.readAll(0, &stdin, max_stdin, .in(deadlines.stdin_ms))) {
        .whole => return stdin.bytes(),
        .no_memory => answer.outOfMemory(),
        .too_long => answer.refuse(.io_failure, .{
            trouble, "the network configuration is longer than ", max_stdin, " bytes",
        }, ""),
        .late => answer.refuse(.io_failure, .{
            trouble, "the runtime has not closed it after ", deadlines.stdin_ms / 1000, " s",
        }, ""),
        .failed => |e| {
            var space: [32]u8 = undefined;
            answer.refuse(.io_failure, .{ trouble, sys.errnoName(e, &space) }, "");
        },
    }
}

/// ADD into, or DEL from, the namespace of the runtime itself would reconfigure the host. Upstream looks after the
/// work is done, and then prints its refusal behind the result; here nothing has happened yet.
fn refuseOwnNetns(env: checks.Environment) void {
    const override = env.get("CNI_NETNS_OVERRIDE");
    if (std.mem.eql(u8, override, "1") or text.sameWord(override, "true")) return;
    const netns = env.get("CNI_NETNS");
    // One that cannot be looked at is left to the daemon, as upstream leaves it to the plugin.
    if (netns.len == 0) return;
    if (sys.sameFile(netns, "/proc/thread-self/ns/net") or sys.sameFile(netns, "/proc/self/ns/net"))
        answer.refuse(.bad_netns, .{"plugin's netns and netns from CNI_NETNS should not be the same"}, "");
}

const Call = struct {
    verb: Verb,
    env: checks.Environment,
    socket: []const u8,
    cni_dir: []const u8,
    /// The CNI version that the runtime has asked for.
    version: []const u8,
    wait_ms: u64,
    reply_ms: u64,
    body: []const u8,

    fn prepare(verb: Verb, env: checks.Environment, stdin: []const u8, conf: *const netconf.Netconf) text.Error!Call {
        var socket: Buffer = .{};
        try socket.all(.{ std.mem.trimEnd(u8, directory(&conf.socket_dir, default_socket_dir), "/"), "/multus.sock" });
        var body: Buffer = .{};
        try body.add("{\"env\":{");
        try env.cniMembers(&body);
        try body.add("},\"config\":\"");
        try body.base64(stdin);
        try body.add("\"}");
        return .{
            .verb = verb,
            .env = env,
            .socket = socket.bytes(),
            .cni_dir = directory(&conf.cni_dir, default_cni_dir),
            .version = checks.askedVersion(conf),
            .wait_ms = if (verb == .DEL) deadlines.del_wait_ms else deadlines.daemon_wait_ms,
            .reply_ms = switch (verb) {
                .STATUS => deadlines.status_reply_ms,
                .DEL => deadlines.del_reply_ms,
                else => deadlines.reply_ms,
            },
            .body = body.bytes(),
        };
    }

    fn make(self: *const Call) text.Error!noreturn {
        if (self.socket.len > daemon.max_path) {
            if (self.verb == .DEL) try self.keep("the path of its socket is too long");
            var msg: Buffer = .{};
            try msg.all(.{ "daemonSocketDir is too long: ", self.socket, " has ", self.socket.len });
            try msg.all(.{ " bytes and a socket path at most ", daemon.max_path });
            answer.refuseWith(.bad_config, msg.bytes(), "");
        }
        var head: Buffer = .{};
        try head.add("POST /cni HTTP/1.1\r\nHost: dummy\r\nUser-Agent: multus-shim/" ++ release ++ "\r\n");
        try head.add("Accept: " ++ daemon.stdout_type ++ "\r\nContent-Type: application/json\r\n");
        try head.all(.{ "Content-Length: ", self.body.len, "\r\nConnection: close\r\n\r\n" });
        var fd = try self.connect(self.wait_ms);
        const deadline: sys.Deadline = .in(self.reply_ms);
        var repeats: u6 = 0;
        while (true) : (repeats += 1) {
            const outcome = try daemon.exchange(fd, head.bytes(), self.body, deadline);
            _ = linux.close(fd);
            const again = repeats < most_repeats;
            switch (outcome) {
                .reply => |reply| if (reply.status != handed_over or !again) try self.copy(&reply),
                .late => try self.late(),
                .broken => |what| try self.broken(what),
                .cut => |what| if (!again) try self.broken(what),
            }
            log.put(.debug, "asked again", "");
            sys.sleep(@min(@as(u64, repeat_pause_ms) << repeats, deadline.left()));
            fd = try self.connect(@min(self.wait_ms, deadline.left()));
        }
    }

    fn connect(self: *const Call, wait_ms: u64) text.Error!i32 {
        return switch (daemon.connect(self.socket, .in(wait_ms), self.verb == .STATUS)) {
            .open => |fd| fd,
            .absent => |e| try self.cannotConnect(e, true),
            .refused => |e| try self.cannotConnect(e, false),
        };
    }

    fn cannotConnect(self: *const Call, e: sys.Errno, waited: bool) text.Error!noreturn {
        var space: [32]u8 = undefined;
        const name = sys.errnoName(e, &space);
        if (self.verb == .DEL) try self.keep(name);
        const where = "; start its pod on this node (kubectl get pods -A -l app=multus -o wide), or correct daemonSocketDir";
        if (self.verb == .STATUS)
            answer.refuse(.unavailable, .{ "multus daemon is not available: ", self.socket, ": ", name, where }, "");
        var msg: Buffer = .{};
        if (!waited) {
            try msg.all(.{ "multus daemon cannot be called: connect to ", self.socket, ": ", name });
            try msg.add("; is daemonSocketDir the daemon's socketDir, and does the runtime run the shim as root?");
            answer.refuseWith(.internal, msg.bytes(), "");
        }
        try msg.all(.{ "multus daemon does not listen on ", self.socket, ": ", name, ", tried for " });
        try msg.seconds(self.wait_ms);
        try msg.add(where);
        answer.refuseWith(.try_again, msg.bytes(), "");
    }

    fn late(self: *const Call) text.Error!noreturn {
        var msg: Buffer = .{};
        try msg.all(.{ "no complete reply to ", @tagName(self.verb), " within " });
        try msg.seconds(self.reply_ms);
        if (self.verb == .DEL) try self.keep(msg.bytes());
        try msg.all(.{ " from the multus daemon on ", self.socket, "; its log says what it was doing" });
        answer.refuseWith(if (self.verb == .STATUS) .unavailable else .try_again, msg.bytes(), "");
    }

    fn broken(self: *const Call, what: []const u8) text.Error!noreturn {
        if (self.verb == .DEL) try self.keep(what);
        var msg: Buffer = .{};
        try msg.all(.{ "no usable reply to ", @tagName(self.verb), " from ", self.socket, ": ", what });
        try msg.add("; did the multus daemon stop just now (its log), or is another program listening there?");
        answer.refuseWith(.internal, msg.bytes(), "");
    }

    fn copy(self: *const Call, reply: *const daemon.Reply) text.Error!noreturn {
        const ok = reply.status == 200;
        if (ok and reply.body.len == 0 and self.verb != .ADD) answer.finish("", 0);
        if (reply.forStdout() and reply.body.len > 0) answer.finish(reply.body, if (ok) 0 else 1);
        if (ok and self.verb == .ADD) switch (try results.convert(reply.body, self.version)) {
            .result => |bytes| answer.finish(bytes, 0),
            .wrong => |why| answer.refuseWith(.incompatible_version, why, ""),
            .no_result => {},
        };
        if (reply.status == 400) if (try results.failure(reply.content_type, reply.body)) |failure| {
            if (self.verb == .DEL) self.passOver(&failure);
            answer.fail(failure.code, failure.msg, failure.details);
        };
        var msg: Buffer = .{};
        try msg.all(.{
            "the reply to ", @tagName(self.verb), " from ", self.socket, " is not for a CNI plugin's stdout: status line ",
        });
        try daemon.excerpt(&msg, reply.status_line);
        try msg.add(", content type ");
        try daemon.excerpt(&msg, reply.content_type);
        try msg.all(.{ " (wanted " ++ daemon.stdout_type ++ "), ", reply.body.len, " bytes of body: " });
        try daemon.excerpt(&msg, reply.body);
        try msg.add("; is the multus daemon of another version than this shim (" ++ release ++ "),");
        try msg.add(" or is another program listening there?");
        answer.refuseWith(.internal, msg.bytes(), "");
    }

    /// Ends a DEL that upstream's daemon has failed, as upstream's shim does: it is done. That daemon forgets a container
    /// with its first DEL, and never succeeds with a cluster network that is a list from a file; the runtime would repeat
    /// it, and keep the pod, for ever.
    fn passOver(_: *const Call, failure: *const results.Failure) noreturn {
        log.put(.@"error", "upstream's daemon has failed, which counts as done: ", failure.msg);
        var note: Buffer = .{};
        note.add("multus-shim: DEL has failed on upstream's daemon, which counts as done: ") catch answer.outOfMemory();
        note.quote(failure.msg) catch answer.outOfMemory();
        note.byte('\n') catch answer.outOfMemory();
        if (!log.isOnStderr(.@"error")) answer.remark(note.bytes());
        answer.exit(0);
    }

    /// Ends a DEL that the daemon did not take.
    fn keep(self: *const Call, reason: []const u8) text.Error!noreturn {
        var note: Buffer = .{};
        switch (try spool.write(self.cni_dir, self.body)) {
            .written => |path| {
                const id = self.env.get("CNI_CONTAINERID");
                try note.all(.{ "multus-shim: DEL of container ", id, " interface ", self.env.get("CNI_IFNAME") });
                try note.all(.{ ": multus daemon on ", self.socket, " did not take it (", reason, "); kept for it in " });
                try note.add(path);
                log.put(.@"error", "", note.bytes());
                try note.byte('\n');
                if (!log.isOnStderr(.@"error")) answer.remark(note.bytes());
                answer.exit(0);
            },
            .failed => |f| {
                var space: [32]u8 = undefined;
                try note.all(.{ "multus daemon on ", self.socket, " did not take the DEL (", reason, ")" });
                try note.all(.{ " and it could not be kept for later: cannot ", f.step, " ", f.path, ": " });
                try note.all(.{ sys.errnoName(f.errno, &space), "; is cniDir writable?" });
                answer.refuseWith(.io_failure, note.bytes(), "");
            },
        }
    }
};

/// A directory from the configuration; "" counts as not given.
fn directory(slot: *const netconf.Slot, default: []const u8) []const u8 {
    if (slot.wrong) |kind| answer.refuse(.bad_config, .{ slot.key, " must be a string, not ", kindName(kind) }, "");
    const path = checks.string(slot);
    if (std.mem.indexOfScalar(u8, path, 0) != null)
        answer.refuse(.bad_config, .{
            slot.key, " must not contain a NUL character",
        }, "");
    return if (path.len == 0) default else path;
}

fn kindName(kind: netconf.Kind) []const u8 {
    return switch (kind) {
        .object => "an object",
        .array => "an array",
        .string => "a string",
        .number => "a number",
        .bool => "true or false",
        .null => "null",
    };
}
