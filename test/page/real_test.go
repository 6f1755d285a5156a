package page

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

// A cloud of two replicas, edges that are stopped and started, callers, refusals: the page shows them. With
// TUNNEL_PAGE_PICTURES, the name of a folder, the test leaves pictures there.
func TestProcesses(t *testing.T) {
	pictures := os.Getenv("TUNNEL_PAGE_PICTURES")
	sites := []string{"berlin", "lagos"}
	if pictures != "" {
		sites = []string{"berlin", "hanoi", "lagos", "lima", "oslo", "pune", "quito", "turin"}
	}
	var names []string
	for _, site := range sites {
		names = append(names, "shop-"+site+"-1", "shop-"+site+"-2")
	}
	f := newFleet(t, names)
	edges := make(map[string]*rig.Process)
	start := func(i int) {
		var err error
		if edges[names[i]], err = f.edges[i].Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(edges[names[i]].Kill)
		testkit.Within(t, patience, names[i]+" has a session", func() error {
			if err := f.edges[i].Ready(); err != nil {
				return fmt.Errorf("%w; its log:\n%s", err, f.edges[i].Log.String())
			}
			return nil
		})
	}
	for i := range names {
		start(i)
	}
	away, flapping := len(names)-1, 1
	edges[names[away]].Kill()
	for range 3 {
		edges[names[flapping]].Kill()
		start(flapping)
	}
	f.load(t)

	b := visit(t, f.url, size(1280, 720, false))
	b.until("one node is missing, one is flapping, and the others are connected", fmt.Sprintf(
		`document.querySelector("#told").textContent === "1 missing, 1 flapping, %d connected"`, len(names)-1))
	if got := b.names(2); got != names[away]+" "+names[flapping] {
		t.Errorf("the list begins with %s", got)
	}
	b.run(do(`location.hash = "refusals"`))
	b.until("the refused callers are shown", `["no-such-node", "refused"].every(code =>
		document.querySelector("#refusals").innerText.includes(code))`)
	b.run(do(`location.hash = "replicas"`))
	b.until("both replicas are shown", `["cloud-0", "cloud-1"].every(name =>
		document.querySelector("#replicas").innerText.includes(name))`)
	b.run(do(`location.hash = "nodes"`))
	if pictures != "" {
		time.Sleep(time.Minute) // lines need samples
		for name, actions := range map[string][]action{
			"page.png":      {colours("light")},
			"page-dark.png": {colours("dark")},
			"page-node.png": {colours("light"), size(1000, 720, false), do(`location.hash = "node/` + names[away] + `"`)},
		} {
			b.run(append(actions, chromedp.Sleep(300*time.Millisecond))...)
			png, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
			if err == nil {
				err = os.WriteFile(filepath.Join(pictures, name), png, 0o644)
			}
			if err != nil {
				t.Fatal(err)
			}
			b.run(size(1280, 720, false), do(`location.hash = "nodes"`))
		}
	}
	start(away)
	b.until("the missing node is back", `document.querySelector("#told").textContent.startsWith("0 missing")`)
}

// processes are a cloud of two replicas with a page each, and edges that are not started.
type processes struct {
	fleet *rig.Fleet
	edges []*rig.Member
	names []string
	url   string // of the page of the first replica
}

// newFleet starts the replicas.
func newFleet(t *testing.T, names []string) *processes {
	t.Helper()
	echo := testkit.Serve(t, testkit.Echo)
	ca, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	doors := map[string]string{"closed": names[0] + "/127.0.0.1:1", "away": names[len(names)-1] + "/" + echo}
	for _, name := range names[:len(names)-1] {
		doors[name] = name + "/" + echo
	}
	f, err := rig.NewFleet(rig.FleetConfig{
		Binary: program, Dir: dir, CA: ca, Hosts: make([]rig.Host, 2), Nodes: names, Doors: doors,
	})
	if err != nil {
		t.Fatal(err)
	}
	p := &processes{fleet: f, names: names}
	for i, r := range f.Replicas {
		port := testkit.FreePort(t)
		appendTo(t, filepath.Join(dir, r.Name+".toml"), fmt.Sprintf("[mode.cloud.admin]\npage = \"127.0.0.1:%d\"\n", port))
		if i == 0 {
			p.url = fmt.Sprintf("http://127.0.0.1:%d/", port)
		}
		t.Setenv("POD_NAME", fmt.Sprintf("cloud-%d", i)) // the name of the replica: all run on one machine
		process, err := r.Start()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(process.Kill)
	}
	for _, r := range f.Replicas {
		testkit.Within(t, patience, r.Name+" is ready", r.Ready)
	}
	for i, name := range names {
		e, err := f.Edge(rig.EdgeConfig{Node: name, Cloud: f.Replicas[i%2].GRPC(), Allow: []string{"127.0.0.0/8:*"}})
		if err != nil {
			t.Fatal(err)
		}
		p.edges = append(p.edges, e)
	}
	return p
}

// load has callers use the nodes until the test ends, and has some refused.
func (p *processes) load(t *testing.T) {
	t.Helper()
	for _, door := range []string{"closed", "away"} {
		c, err := net.Dial("tcp", p.fleet.Replicas[0].Door(door))
		if err != nil {
			continue // refused at once
		}
		c.SetDeadline(time.Now().Add(patience))
		io.Copy(io.Discard, c) // until it is refused
		c.Close()
	}
	var conns []net.Conn
	for i, name := range p.names[:len(p.names)-1] {
		for range i%4 + 1 {
			c, err := net.Dial("tcp", p.fleet.Replicas[0].Door(name))
			if err != nil {
				t.Fatal(err)
			}
			go io.Copy(io.Discard, c)
			conns = append(conns, c)
		}
	}
	stop, ended := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() {
		close(stop)
		<-ended
	})
	go func() {
		defer close(ended)
		block := make([]byte, 8<<10)
		for turn := 0; ; turn++ {
			for i, c := range conns {
				if (turn/20+i)%3 == 0 { // so that the lines are not flat
					c.Write(block[:1+(i*937)%len(block)])
				}
			}
			select {
			case <-time.After(100 * time.Millisecond):
			case <-stop:
				for _, c := range conns {
					c.Close()
				}
				return
			}
		}
	}()
}

func appendTo(t *testing.T, file, text string) {
	t.Helper()
	old, err := os.ReadFile(file)
	if err == nil {
		err = os.WriteFile(file, append(old, text...), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}
