package cni

import (
	"bufio"
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// steps are the system calls by which the plugin changes the node: files, links, namespaces.
const steps = "flock,write,fsync,?rename,?renameat,?renameat2,?unlink,unlinkat,mkdirat,sendto,setns"

// stepwise has strace(1) print each step, and stop the plugin at its end. The test has the plugin go on, or kills it:
// where it is killed does not depend on how fast the machine is.
var stepwise = []string{"-f", "-qq", "-e", "signal=none", "-e", "trace=" + steps,
	"-e", "inject=" + steps + ":signal=STOP"}

// stepLine is what strace prints at the end of a step. "[pid 7] <... fsync resumed>) = 0" is an end, too.
var stepLine = regexp.MustCompile(`^(?:\[pid +[0-9]+\] )?(?:<\.\.\. )?([a-z0-9]+)(?:\(| resumed).*[^>]$`)

// needsStrace skips a test where strace(1) cannot trace.
func needsStrace(t *testing.T) {
	t.Helper()
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Skipf("strace(1) stops the plugin at each step: %v", err)
	}
	if out, err := exec.Command(strace, "-f", "-qq", "-e", "trace="+steps, "true").CombinedOutput(); err != nil {
		t.Skipf("strace(1) may not trace here: %v: %s", err, out)
	}
}

// runKilled is run of a plugin that is killed after step n. It returns the calls of its steps until then, and reports
// false if the plugin had fewer steps; then the verb has been executed.
func (c *containers) runKilled(n int, verb string, rt attached, extra map[string]any) (calls []string, killed bool) {
	c.t.Helper()
	cmd, err := c.command(verb, rt, extra)
	if err != nil {
		c.t.Fatal(err)
	}
	strace := exec.Command("strace", append(stepwise, c.plugin)...)
	strace.Env, strace.Stdin = cmd.Env, cmd.Stdin
	strace.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // one signal reaches strace and the plugin
	stderr, err := strace.StderrPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	if err := strace.Start(); err != nil {
		c.t.Fatal(err)
	}
	lines := bufio.NewScanner(stderr)
	for lines.Scan() {
		step := stepLine.FindStringSubmatch(lines.Text())
		if step == nil {
			continue
		}
		calls = append(calls, step[1])
		signal := syscall.SIGCONT
		if len(calls) == n {
			signal, killed = syscall.SIGKILL, true
		}
		if err := syscall.Kill(-strace.Process.Pid, signal); err != nil {
			c.t.Fatal(err)
		}
	}
	if err := strace.Wait(); !killed && err != nil {
		c.t.Fatalf("%s: %v", verb, err)
	}
	return calls, killed
}

// eachStep executes a verb, killed after step 1, 2, 3, …, and once until its end. Every call that the verb makes must
// have been the last of a killed one. prepare returns the pod; after looks what is left.
func eachStep(t *testing.T, c *containers, verb string, prepare func() *pod, after func(n int, p *pod)) {
	t.Helper()
	last := make(map[string]int) // how often a call was the last
	for n := 1; ; n++ {
		p := prepare()
		calls, killed := c.runKilled(n, verb, p.rt, p.previous())
		if killed {
			last[calls[n-1]]++
			after(n, p)
			continue
		}
		t.Logf("killed after %d steps: %v", n-1, last)
		for _, call := range append([]string{"flock", "fsync", "sendto", "write"}, calls...) {
			if last[call] == 0 {
				t.Errorf("%s was never killed after %s; its steps are %v", verb, call, calls)
			}
		}
		return
	}
}

// ADD is killed after each step. Then, in turn: the runtime calls DEL; the namespace ends and nobody calls DEL;
// or the pod is made again while its first namespace lives. Nothing leaks, and no address has two pods.
func TestAddKilledAtEachStep(t *testing.T) {
	needsStrace(t)
	if !inOwnNetwork(t) {
		return
	}
	c := newContainers(t, "1.1.0", subnet4, subnet6)
	other := c.newPod("other-0")
	other.add()
	turn := 0
	eachStep(t, c, "ADD", func() *pod { return c.newPod("web-0") }, func(n int, p *pod) {
		switch turn++; turn % 3 {
		case 0:
			p.del()
		case 1:
			p.end()
		case 2:
			again := c.newPod("web-0")
			again.add()
			distinct(t, c, again, other)
			p.del()
			again.del()
		}
		c.onlyOne(other, fmt.Sprintf("killed after step %d, turn %d", n, turn%3))
		next := c.newPod("web-0")
		next.add()
		distinct(t, c, next, other)
		for i := range next.addrs {
			reaches(t, other, next, next.addrs[i])
		}
		next.del()
	})
}

// DEL is killed after each step. The next DEL, or the next STATUS once the namespace has ended, frees everything.
func TestDelKilledAtEachStep(t *testing.T) {
	needsStrace(t)
	if !inOwnNetwork(t) {
		return
	}
	c := newContainers(t, "1.1.0", subnet4, subnet6)
	other := c.newPod("other-0")
	other.add()
	turn := 0
	added := func() *pod {
		p := c.newPod("web-0")
		p.add()
		return p
	}
	eachStep(t, c, "DEL", added, func(n int, p *pod) {
		before := join(p.addrs)
		if turn++; turn%2 == 0 {
			p.del()
		} else {
			p.end()
		}
		c.onlyOne(other, fmt.Sprintf("killed after step %d, turn %d", n, turn%2))
		again := c.newPod("web-0")
		again.add()
		want(t, "web-0, made again", join(again.addrs), before)
		again.del()
	})
}

// After a reboot, the first STATUS releases all addresses. Others wait for the lock meanwhile, and a sync may take
// many milliseconds: the plugin syncs the folder once, not once for each address.
func TestRebootSyncsFolderOnce(t *testing.T) {
	needsStrace(t)
	if !inOwnNetwork(t) {
		return
	}
	c := newContainers(t, "1.1.0", subnet4, subnet6)
	for i := range 10 {
		c.add(c.live(fmt.Sprint("c", i), fmt.Sprint("pod-", i)))
	}
	reboot(t, c.node)
	cmd, err := c.command("STATUS", attached{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	strace := exec.Command("strace", "-f", "-qq", "-e", "signal=none", "-e", "trace=fsync", c.plugin)
	strace.Env, strace.Stdin = cmd.Env, cmd.Stdin
	out, err := strace.CombinedOutput()
	if err != nil {
		t.Fatalf("STATUS: %v: %s", err, out)
	}
	if syncs := strings.Count(string(out), "fsync("); syncs != 21 {
		t.Errorf("STATUS syncs %d times after a reboot, want 20 files and the folder once", syncs)
	}
	if used := c.inUse(); len(used) > 0 {
		t.Errorf("in use after the reboot: %v", used)
	}
}

// distinct checks that the files give each address to the pod that has it.
func distinct(t *testing.T, c *containers, pods ...*pod) {
	t.Helper()
	owners := c.inUse()
	for _, p := range pods {
		for _, addr := range p.addrs {
			if owners[addr.String()] != p.rt.container {
				t.Errorf("%s has %s, which the files give to %q", p.rt.container, addr, owners[addr.String()])
			}
		}
	}
}

// onlyOne waits until STATUS has freed everything but one pod's addresses and link.
func (c *containers) onlyOne(p *pod, why string) {
	c.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if err := c.status(); err != nil {
			c.t.Fatalf("%s: STATUS: %v", why, err)
		}
		links, used := hostLinks(c.t.(*testing.T)), c.inUse()
		if len(links) == 1 && links[0] == p.hostLink() && len(used) == len(p.addrs) {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("%s: left are the links %v and the addresses %v, want those of %s", why, links, used, p.rt.container)
		}
	}
}
