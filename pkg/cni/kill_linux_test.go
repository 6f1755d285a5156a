package cni

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
)

// churnDir in the environment makes the test program a process that adds and deletes until it is killed. The
// folder holds a file "netns" with the path of a namespace, and the reservations.
const churnDir = "TUNNEL_CNI_TEST_CHURN"

// churn says what it will do before it does it, and what it has done after.
func churn(dir string) {
	fail := func(err error) {
		fmt.Println("error", err)
		os.Exit(1)
	}
	path, err := os.ReadFile(filepath.Join(dir, "netns"))
	if err != nil {
		fail(err)
	}
	inode, err := namespaceAt(string(path))
	if err != nil {
		fail(err)
	}
	conf, err := parseConf([]byte(fmt.Sprintf(churnConf, filepath.Join(dir, "data"))))
	if err != nil {
		fail(err)
	}
	for i := 0; ; i++ {
		id := fmt.Sprintf("%d-%d", os.Getpid(), i)
		r := Reservation{Network: conf.Name, ContainerID: id, IfName: "eth0", Pod: Pod{"shop", fmt.Sprint("pod-", i%5), ""},
			NetNS: string(path), NetNSInode: inode, BootID: bootID(), Reserved: time.Now().UTC()}
		fmt.Println("add", id)
		addrs, _, err := reserve(conf, r)
		if err != nil {
			fail(err)
		}
		fmt.Println("added", id, join(addrs))
		if i%3 == 0 {
			continue
		}
		fmt.Println("del", id)
		if err := free(conf, r.attachment()); err != nil {
			fail(err)
		}
		fmt.Println("deleted", id)
	}
}

const churnConf = `{"cniVersion": "1.1.0", "name": "pods", "datadir": %q, "subnets": ["10.88.0.0/20", "fd00:88::/64"]}`

// Processes are killed at random moments of ADD and DEL, several at once. What they have said to have done is
// done, no address has two owners, and DEL of whatever was begun leaves nothing.
func TestKilledAnywhere(t *testing.T) {
	rounds := 30
	if testing.Short() {
		rounds = 5
	}
	dir := t.TempDir()
	own := fmt.Sprintf("/proc/%d/ns/net", os.Getpid())
	if err := os.WriteFile(filepath.Join(dir, "netns"), []byte(own), 0o600); err != nil {
		t.Fatal(err)
	}
	conf, err := parseConf([]byte(fmt.Sprintf(churnConf, filepath.Join(dir, "data"))))
	if err != nil {
		t.Fatal(err)
	}
	n, killedIn := &node{t, conf}, make(map[string]int) // by what a process was about to do; "" for between two things
	for range rounds {
		var outputs []string
		processes := []*exec.Cmd{startChurn(t, dir), startChurn(t, dir), startChurn(t, dir)}
		for _, p := range processes {
			outputs = append(outputs, killChurn(t, p))
		}
		for _, output := range outputs {
			killedIn[checkChurn(t, n, output)]++
		}
		if all := n.inUse(); len(all) != 0 {
			t.Fatalf("in use after DEL of everything that was begun: %v", all)
		}
	}
	t.Logf("killed in: %v", killedIn)
	if killedIn["add"] < rounds/2 || killedIn["del"] < rounds/10 {
		t.Errorf("of %d processes, too few were killed in ADD and DEL to show anything: %v", 3*rounds, killedIn)
	}
}

func startChurn(t *testing.T, dir string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), churnDir+"="+dir)
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Env = append(cmd.Env, "OUT="+out.Name())
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd
}

// killChurn waits until the process has begun some operations, kills it soon, and returns its output. It counts
// operations, not time: on a slow disk one takes long.
func killChurn(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	file := strings.TrimPrefix(cmd.Env[len(cmd.Env)-1], "OUT=")
	read := func() string {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	begun := func() (n int) {
		for line := range strings.Lines(read()) {
			if strings.HasPrefix(line, "add ") || strings.HasPrefix(line, "del ") {
				n++
			}
		}
		return n
	}
	enough := 2 + rand.N(8) // the first that it deletes is the second that it adds
	testkit.Eventually(t, "the process has begun some operations", func() bool { return begun() >= enough })
	time.Sleep(rand.N(5 * time.Millisecond))
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // reports that it was killed
	return read()
}

// checkChurn compares what a killed process said with the files, and deletes what it began. It returns "add" or
// "del" if the process was killed in the middle of it.
func checkChurn(t *testing.T, n *node, output string) (killedIn string) {
	t.Helper()
	has, deleting, begun := make(map[string]string), make(map[string]bool), []string{}
	for lines := bufio.NewScanner(strings.NewReader(output)); lines.Scan(); {
		var verb, id, addrs string
		_, _ = fmt.Sscan(lines.Text(), &verb, &id, &addrs) // the last line may be cut
		killedIn = map[string]string{"add": "add", "del": "del"}[verb]
		switch verb {
		case "add":
			begun = append(begun, id)
		case "added":
			has[id] = addrs
		case "del":
			deleting[id] = true
		case "deleted":
			delete(has, id)
		case "error":
			t.Fatalf("a process failed: %s", output)
		}
	}
	owners := n.inUse()
	for id, addrs := range has {
		for addr := range strings.SplitSeq(addrs, ",") {
			if !deleting[id] && owners[addr] != id {
				t.Errorf("%s was added with %s; the owner in the files is %q", id, addr, owners[addr])
			}
		}
	}
	for _, id := range begun {
		n.del(id)
	}
	return killedIn
}
