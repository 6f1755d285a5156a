package testkit

import (
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ownNetwork marks a test process that runs in a network namespace of its own.
const ownNetwork = "TUNNEL_TEST_OWN_NETWORK"

// InOwnNetwork runs the calling test again, in a process whose network namespace holds nothing but
// loopback. It returns true in that process. In the first process it returns false, after the other one
// has ended; the test returns then. If the test skips itself there, it is skipped here. env ("NAME=value")
// is added to the environment of the process.
//
// Root needs no more rights. Other users need user namespaces; a machine without them skips the test.
func InOwnNetwork(t *testing.T, env ...string) bool {
	t.Helper()
	if os.Getenv(ownNetwork) != "" {
		loopback, err := netlink.LinkByName("lo")
		if err == nil {
			err = netlink.LinkSetUp(loopback)
		}
		if err != nil {
			t.Fatalf("setting loopback up: %v", err)
		}
		skipDAD()
		return true
	}
	again := func(args ...string) *exec.Cmd {
		cmd := exec.Command(os.Args[0], args...)
		cmd.Env = append(append(os.Environ(), ownNetwork+"=1"), env...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
		if os.Getuid() != 0 {
			cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
			cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
			cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
		}
		return cmd
	}
	// The kernel sends Pdeathsig when the thread ends that has started the child (prctl(2)).
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := again("-test.list=^$").Run(); err != nil {
		t.Skipf("a process cannot get a network namespace of its own: %v", err)
	}
	out, err := again("-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=15m").CombinedOutput()
	if err != nil {
		t.Errorf("in a network namespace of its own: %v", err)
	}
	if skipped(out, t.Name()) {
		t.Skipf("%s", out) // else a test that shows nothing passes
	}
	t.Logf("%s", out)
	return false
}

// UnshareNetwork moves the calling thread into a new network namespace, see [OnThread].
func UnshareNetwork() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return err
	}
	skipDAD()
	return nil
}

// skipDAD makes new links in the network namespace of the calling thread use their link-local addresses at once.
// Otherwise a link first looks for duplicates of the address, for 2 s and longer. It does not look for neighbors
// meanwhile, so connections fail with "no route to host" after 3 s.
func skipDAD() {
	// Without this file, there is no IPv6.
	os.WriteFile("/proc/sys/net/ipv6/conf/default/accept_dad", []byte("0"), 0o600) //nolint:errcheck // see above
}

// skipped reports whether a test has skipped itself, by the output of its process.
func skipped(out []byte, name string) bool {
	return regexp.MustCompile(`(?m)^ *--- SKIP: ` + regexp.QuoteMeta(name) + ` \(`).Match(out)
}
