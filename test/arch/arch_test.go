package arch

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "tunnel.example/tunnel"

// An arrow says what the packages at and below a path may import of ours, and why no
// more. The longest path that fits a package counts; one that no path fits fails.
type arrow struct {
	pkg string
	may []string
	why string
}

var arrows = []arrow{
	{"cmd", []string{"conf", "internal", "pkg"},
		"cmd wires everything; it knows modules, and modules know nothing of each other"},
	{"cmd/tunnel-cni", []string{"pkg/cni"},
		"a runtime executes the plugin for every pod, and on machines with slow disks: it is small"},
	{"conf", []string{"pkg/auth", "pkg/dial", "pkg/tunnel"},
		"the configuration knows words and formats, such as those of addresses; cmd translates it for the modules"},
	{"pkg/tunnel", nil, "the core words know no module and no transport, so that anything can be built on them"},
	{"pkg/auth", []string{"pkg/reload", "pkg/tunnel"}, "who may do what is asked by modules and asks none of them"},
	{"pkg/listen", []string{"pkg/tunnel"},
		"who may stay at a port is counted in one place, for every protocol; it knows none"},
	{"pkg/balancer", []string{"pkg/auth", "pkg/listen", "pkg/tunnel"},
		"who called a balancer is read before a port counts its caller; it knows no port"},
	{"pkg/conn", []string{"pkg/tunnel", "pkg/stream/tunnelv1"},
		"a forwarded connection knows its chunks and its way; sessions, joins and tickets are pkg/stream's"},
	{"pkg/wsconn", nil, "a net.Conn inside a WebSocket; who speaks TLS in it is for its users to know"},
	{"pkg/dial", []string{"pkg/wsconn"}, "a way to the cloud ends where the cloud's TLS begins; it knows no session"},
	{"pkg/stream", []string{
		"pkg/auth", "pkg/balancer", "pkg/conn", "pkg/dial", "pkg/listen", "pkg/tunnel", "pkg/wsconn", "pkg/stream/tunnelv1",
	},
		"a transport carries for every module and knows none"},
	{"pkg/peers", []string{"pkg/stream", "pkg/stream/tunnelv1", "pkg/tunnel"},
		"a directory of the replicas' directories: pkg/stream carries its sessions, and knows it only as stream.Replicas"},
	{"pkg/stream/tunnelv1", nil,
		"generated code; the wire belongs to pkg/conn (chunks) and pkg/stream (everything else); " +
			"pkg/peers reads only what replicas say of nodes"},
	{"pkg/services", []string{"pkg/services/servicesv1", "pkg/tunnel"},
		"what a node has to know of Services, and which endpoints it uses, is pure: cloud and edge build on it"},
	{"pkg/services/servicesv1", nil, "generated code; the wire belongs to pkg/services and what is below it"},
	{"pkg/services/hub", []string{"pkg/services", "pkg/tunnel"},
		"it is told of the cluster's objects and serves them to edges; it knows neither Kubernetes nor the transport"},
	{"pkg/services/names", []string{"pkg/services"},
		"names follow from what a node knows of Services; who asks for them is for pkg/dns"},
	{"pkg/services/relay", []string{"pkg/listen", "pkg/services", "pkg/tunnel", "pkg/udp"},
		"it keeps the node's state and serves what no route reaches; cmd gives it the calls of a session"},
	{"pkg/services/mirror", []string{"pkg/kube", "pkg/listen", "pkg/tunnel"},
		"it writes twins of Services and accepts their callers; which endpoint a caller gets is for pkg/egress"},
	{"pkg/hello", nil, "a ClientHello is read for whoever decides by it"},
	{"pkg/oneport", []string{"pkg/auth", "pkg/balancer", "pkg/hello", "pkg/listen", "pkg/tunnel"},
		"it sorts connections for modules, which it knows only as listeners"},
	{"pkg/https", []string{"pkg/auth", "pkg/balancer", "pkg/hello", "pkg/listen", "pkg/tunnel"},
		"a front door asks a tunnel.Dialer and must not know which transport answers"},
	{"pkg/tcp", []string{"pkg/auth", "pkg/balancer", "pkg/listen", "pkg/tunnel"},
		"a front door asks a tunnel.Dialer and must not know which transport answers"},
	{"pkg/udp", []string{"pkg/auth", "pkg/listen", "pkg/tunnel"},
		"a front door asks a tunnel.Dialer and must not know which transport answers"},
	{"pkg/egress", []string{"pkg/auth", "pkg/balancer", "pkg/konnectivity", "pkg/listen", "pkg/socket", "pkg/tunnel"},
		"a front door asks a tunnel.Dialer and must not know which transport answers; its callers speak Konnectivity's wire"},
	{"pkg/konnectivity", []string{"pkg/auth", "pkg/balancer", "pkg/listen", "pkg/tunnel"},
		"agents are a transport: they carry conns for every front door, and know none"},
	{"pkg/dns", []string{"pkg/auth", "pkg/kube", "pkg/listen", "pkg/tunnel"},
		"who holds which node is asked of tunnel.Nodes, not of a transport"},
	{"pkg/netwatch", []string{"pkg/tunnel"}, "it tells that the network has changed; what follows is for its listener"},
	{"pkg/reload", []string{"pkg/tunnel"},
		"what it follows is given to it; modules ask it by plain funcs, and need not know it"},
	{"pkg/cni", nil,
		"pods get addresses without the tunnel and without the cloud; the edge may use it, never the other way"},
	{"pkg/podnet", []string{"pkg/cni"},
		"it prepares the node for the plugin; cmd tells it the networks, whoever knows them"},
	{"pkg/kube", []string{"pkg/services", "pkg/tunnel"},
		"what is asked of Kubernetes is for modules to decide; it knows none, and pkg/services is no module"},
	{"pkg/multipath", []string{"pkg/tunnel"},
		"it speaks to the kernel about addresses, and reads sessions' paths; which transport has the paths it does not know"},
	{"pkg/takeover", []string{"pkg/listen", "pkg/tunnel"},
		"it starts a process and hands sockets over; what they are for, and when to drain, is for cmd"},
	{"pkg/socket", nil, "a unix socket is a listener like any other; whose it is it does not know"},
	{"pkg/admin", []string{"pkg/listen", "pkg/socket", "pkg/tunnel"},
		"health and metrics are told what to show; they reach into nobody"},
	{"pkg/audit", []string{"pkg/tunnel"},
		"it writes what modules record by a tunnel.Trail; they do not know who takes it"},
	{"pkg/inventory", []string{"pkg/kube", "pkg/tunnel"},
		"it is told of sessions and certificates; who tells it it does not know"},
	{"pkg/ping", []string{"pkg/tunnel"}, "a ping is a conn like any other; it asks a tunnel.Dialer"},
	{"pkg/spans", []string{"pkg/tunnel"},
		"it sends the spans that a tunnel.Tracer gives it; which part of a conn made them it does not know"},
	{"pkg/tap", []string{"pkg/tunnel"}, "it is shown events of front doors; it knows none, and not who reads"},
	{"pkg/trace", []string{"pkg/auth", "pkg/tunnel"},
		"a trace is a conn like any other; the edge's policy says what its dial would do"},
	{"pkg/api", []string{"pkg/admin", "pkg/inventory", "pkg/peers", "pkg/ping", "pkg/tap", "pkg/trace", "pkg/tunnel"},
		"it shows what others know, and asks the other replicas; no module and no transport knows it"},
	{"pkg/page", []string{"pkg/admin", "pkg/api", "pkg/listen", "pkg/tunnel"},
		"it shows what the API knows; it asks nobody else, and nobody knows it"},
	{"pkg/setup", []string{"conf", "pkg/auth", "pkg/dial", "pkg/kube", "pkg/reload", "pkg/stream", "pkg/tunnel"},
		"it reads and writes configuration files, or objects of Kubernetes in their place, and joins as an edge does; " +
			"no daemon's module is in it"},
	{"pkg/check", []string{
		"conf", "pkg/admin", "pkg/api", "pkg/auth", "pkg/cni", "pkg/dial", "pkg/kube", "pkg/services", "pkg/setup",
		"pkg/stream", "pkg/tunnel",
	},
		"it looks at everything as a stranger would, and asks daemons over their sockets; no daemon's module is in it"},
	{"internal/demo", []string{"pkg/auth", "pkg/reload", "pkg/stream"},
		"it runs the program itself for each end; only a stranger with a wrong token is its own"},
	{"internal/logline", nil, "what a line of a log must be is the same for tests and for processes of tests"},
	{"internal/freeport", nil, "tests, the rig and benchmarks choose ports by it; it must not import testing"},
	{"internal/testkit", []string{"internal/freeport", "internal/logline"},
		"waiting and logs are the same in every test; a test of any package may use it, so it knows none of them"},
	{"internal/testkit/testca", []string{"pkg/auth"},
		"certificates for tests are those of pkg/auth; its own tests import testkit, so testkit cannot have them"},
	{"internal/testkit/choices", []string{"pkg/services"},
		"the tests of pkg/services and of kube-proxy share a table of questions and answers"},
	{"test", []string{"conf", "internal/freeport", "internal/logline", "pkg", "test"},
		"what needs two ends may use every package but cmd, which it runs as a process"},
	{"bench", []string{"internal/freeport", "pkg", "test/rig"},
		"a benchmark starts its processes as the tests do; no test depends on a benchmark"},
	{"tools", nil, "a tool reads this repository as files, and works on a tree that does not build"},
}

// goPackage is what the files of one directory say; tests apart, which may import
// what they like except cmd.
type goPackage struct {
	imports     map[string]string // of ours, without the module; to the file that does it
	testImports map[string]string
	doc         bool
	code        bool // has files that are not tests
}

// packages reads every package of the module; other modules inside it are not ours.
func packages(t *testing.T) map[string]*goPackage {
	t.Helper()
	root := filepath.Join("..", "..")
	found := make(map[string]*goPackage)
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			_, statErr := os.Stat(filepath.Join(file, "go.mod"))
			if file != root && (statErr == nil || strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(file, ".go") {
			return nil
		}
		rel, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		dir := path.Dir(filepath.ToSlash(rel))
		if found[dir] == nil {
			found[dir] = &goPackage{imports: map[string]string{}, testImports: map[string]string{}}
		}
		return found[dir].read(file)
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func (p *goPackage) read(file string) error {
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly|parser.ParseComments)
	if err != nil {
		return err
	}
	into := p.testImports
	if !strings.HasSuffix(file, "_test.go") {
		into, p.code = p.imports, true
		p.doc = p.doc || f.Doc != nil && !ast.IsGenerated(f)
	}
	for _, i := range f.Imports {
		name, err := strconv.Unquote(i.Path.Value)
		if err != nil {
			return err
		}
		if ours, ok := strings.CutPrefix(name, module+"/"); ok {
			into[ours] = file
		}
	}
	return nil
}

// below reports whether pkg is at dir or inside it.
func below(pkg, dir string) bool { return pkg == dir || strings.HasPrefix(pkg, dir+"/") }

// arrowOf returns the arrow that counts for a package, or nil.
func arrowOf(pkg string) (found *arrow) {
	for i, a := range arrows {
		if below(pkg, a.pkg) && (found == nil || len(a.pkg) > len(found.pkg)) {
			found = &arrows[i]
		}
	}
	return found
}

// Arrows point inward.
func TestArrows(t *testing.T) {
	all := packages(t)
	if all["pkg/tunnel"] == nil || all["pkg/stream"].imports["pkg/tunnel"] == "" {
		t.Fatal("the packages of this module are not found; this test would never fail")
	}
	for name, p := range all {
		a := arrowOf(name)
		if a == nil {
			t.Errorf("%s: no arrow says what it may import; add one, with the reason, to arrows in test/arch", name)
			continue
		}
		for i, file := range p.imports {
			own := below(i, a.pkg) && a.may != nil
			if !own && !slices.ContainsFunc(a.may, func(may string) bool { return below(i, may) }) {
				t.Errorf("%s imports %s, but %s may import only %v: %s", file, i, a.pkg, a.may, a.why)
			}
		}
	}
}

// Nothing imports cmd, not even a test.
func TestNothingImportsCmd(t *testing.T) {
	for name, p := range packages(t) {
		for _, imports := range []map[string]string{p.imports, p.testImports} {
			for i, file := range imports {
				if below(i, "cmd") && !below(name, "cmd") {
					t.Errorf("%s imports %s: cmd is the end of every arrow; what others need belongs into a package", file, i)
				}
			}
		}
	}
}

// Only tests import internal/testkit and what is below it: they import testing, which a program must
// not link.
func TestOnlyTestsImportTestkit(t *testing.T) {
	all, used := packages(t), false
	for name, p := range all {
		for i, file := range p.imports {
			if below(i, "internal/testkit") {
				t.Errorf("%s of %s imports %s: it is for files named _test.go", file, name, i)
			}
		}
		used = used || p.testImports["internal/testkit"] != ""
	}
	if !used {
		t.Error("no test imports internal/testkit; this test would never fail")
	}
}

// Every package says what it is for; in generated ones the source does.
func TestEveryPackageHasADocComment(t *testing.T) {
	for name, p := range packages(t) {
		if p.code && !p.doc && !slices.Contains([]string{"pkg/stream/tunnelv1", "pkg/services/servicesv1"}, name) {
			t.Errorf("%s has no package comment: say what it is, how it is used, and what it does not do", name)
		}
	}
}

// Names that say nothing gather everything.
func TestNoPackageIsNamedForNothing(t *testing.T) {
	for name := range packages(t) {
		for part := range strings.SplitSeq(name, "/") {
			if slices.Contains([]string{"util", "utils", "common", "manager", "context", "helpers", "misc"}, part) {
				t.Errorf("%s: %q says nothing about what is in it", name, part)
			}
		}
	}
}
