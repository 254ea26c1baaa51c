// What containerd gives a container by default: the system calls of RuntimeDefault, by capability, and the paths of /proc
// and /sys that are hidden or read-only. Writes tests/data/runtime-default.json, which tests/e2e/rights.py reads:
//
//	cd tests/e2e/tools/containerd && go run ./defaults >../../../data/runtime-default.json
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"runtime/debug"
	"strings"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

const module = "github.com/containerd/containerd/v2"

// All capabilities that a profile asks about, and more do no harm.
var capabilities = strings.Fields(`
	AUDIT_CONTROL AUDIT_READ AUDIT_WRITE BLOCK_SUSPEND BPF CHECKPOINT_RESTORE CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER
	FSETID IPC_LOCK IPC_OWNER KILL LEASE LINUX_IMMUTABLE MAC_ADMIN MAC_OVERRIDE MKNOD NET_ADMIN NET_BIND_SERVICE
	NET_BROADCAST NET_RAW PERFMON SETFCAP SETGID SETPCAP SETUID SYSLOG SYS_ADMIN SYS_BOOT SYS_CHROOT SYS_MODULE SYS_NICE
	SYS_PACCT SYS_PTRACE SYS_RAWIO SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG WAKE_ALARM`)

type rule struct {
	specs.LinuxSyscall
	With    string `json:"with,omitempty"`    // Only with this capability.
	Without string `json:"without,omitempty"` // Only without it.
}

func rules(names ...string) []specs.LinuxSyscall {
	spec := &specs.Spec{Linux: &specs.Linux{}, Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{}}}
	for _, name := range names {
		spec.Process.Capabilities.Bounding = append(spec.Process.Capabilities.Bounding, "CAP_"+name)
	}
	return seccomp.DefaultProfile(spec).Syscalls
}

func has(rules []specs.LinuxSyscall, wanted specs.LinuxSyscall) bool {
	for _, rule := range rules {
		if reflect.DeepEqual(rule, wanted) {
			return true
		}
	}
	return false
}

func main() {
	var found []rule
	base := rules()
	for _, each := range base {
		without := ""
		for _, name := range capabilities {
			if !has(rules(name), each) {
				without = name
			}
		}
		found = append(found, rule{each, "", without})
	}
	for _, name := range capabilities {
		for _, each := range rules(name) {
			if !has(base, each) {
				found = append(found, rule{each, name, ""})
			}
		}
	}
	spec, err := oci.GenerateSpec(namespaces.WithNamespace(context.Background(), "any"), nil, &containers.Container{ID: "any"})
	if err != nil {
		panic(err)
	}
	version := ""
	info, _ := debug.ReadBuildInfo()
	for _, dependency := range info.Deps {
		if dependency.Path == module {
			version = dependency.Version
		}
	}
	var masked []string
	for _, path := range spec.Linux.MaskedPaths {
		// One for each processor of this machine.
		if !strings.HasPrefix(path, "/sys/devices/system/cpu/") {
			masked = append(masked, path)
		}
	}
	fmt.Printf("{\"containerd\": %q,\n", version)
	print("maskedPaths", masked)
	print("readonlyPaths", spec.Linux.ReadonlyPaths)
	fmt.Print("\"syscalls\": [\n")
	for number, each := range found {
		if number > 0 {
			fmt.Print(",\n")
		}
		encode(each)
	}
	fmt.Print("]}\n")
}

func print(key string, paths []string) {
	fmt.Printf("%q: ", key)
	encode(paths)
	fmt.Print(",\n")
}

func encode(value any) {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	os.Stdout.Write(text)
}
