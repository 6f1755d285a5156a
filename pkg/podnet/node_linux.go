package podnet

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/cni"
)

// interval is how often a Node looks whether something has changed what it keeps, such as a person who flushes
// all nftables.
const interval = 10 * time.Second

// Config says where a Node keeps things.
type Config struct {
	ConfDir string         // folder of network configurations
	BinDir  string         // folder of CNI plugins
	Subnets []netip.Prefix // networks of the node's pods; nil: SetSubnets tells them
	Routes  bool           // keep routes to the pods of neighbours; SetNeighbours tells them
	// Routed is told to which networks there are routes, after each attempt to make them; nil: nobody is.
	Routed func([]netip.Prefix)
	// Bandwidth says to chain the stock plugin bandwidth, which limits pods as their annotations say.
	Bandwidth bool
	Log       *slog.Logger
}

// Node keeps the network of one node's pods. It is a tunnel.Module.
type Node struct {
	// Set once.
	cfg    Config
	kernel kernel
	log    *slog.Logger
	wake   chan struct{} // SetSubnets sends, Run receives; capacity 1: one wake-up stands for all before it

	asked map[string]answer // by stock plugin; owned by Run

	mu      sync.Mutex // guards the following
	subnets []netip.Prefix
	// neighbours are those that the cloud told last; before it has told any, those in the file.
	neighbours []Neighbour
	told       bool  // the cloud has told neighbours, or that there are none
	routed     int   // to how many networks there are routes, after the last attempt
	limits     bool  // bandwidth stays in the network configuration for pods that have limits
	problem    error // of the last attempt; nil: everything is as it should be
}

// kernel is what a Node changes in the kernel. Tests replace it.
type kernel interface {
	bridge(conf *cni.Conf) error
	// masquerade hides pods with addresses in subnets behind the node, except from the networks in direct.
	masquerade(bridge string, subnets, direct []netip.Prefix) error
	links(bridge string) ([]link, error)
	routes(want []route) error
	// release frees the addresses that pods of an earlier boot had.
	release() error
	// attached counts the pods with links of the plugin.
	attached() (int, error)
}

// New returns a Node. It changes nothing before Run.
func New(cfg Config) (*Node, error) {
	n := &Node{cfg: cfg, kernel: linux{}, log: cfg.Log.With("module", name), wake: make(chan struct{}, 1),
		asked: make(map[string]answer)}
	if cfg.Subnets != nil {
		if _, err := cni.NewConf(cfg.Subnets); err != nil {
			return nil, err
		}
		n.subnets = cfg.Subnets
	}
	return n, nil
}

const name = "cni"

// Name implements tunnel.Module.
func (n *Node) Name() string { return name }

// SetSubnets tells the networks that the cluster has assigned to the node's pods. Networks in the configuration
// have precedence. No networks change nothing: the cloud does not know them yet.
func (n *Node) SetSubnets(subnets []netip.Prefix) {
	if n.cfg.Subnets != nil || len(subnets) == 0 {
		return
	}
	if _, err := cni.NewConf(subnets); err != nil {
		n.log.Warn("the networks for pods from the cloud are not usable; those before stay", "err", err)
		return
	}
	n.mu.Lock()
	changed := !slices.Equal(n.subnets, subnets)
	n.subnets = slices.Clone(subnets)
	n.mu.Unlock()
	if !changed {
		return
	}
	n.log.Info("the cloud has told the networks for pods", "subnets", subnets)
	n.wakeUp()
}

// wakeUp has Run make everything as it should be.
func (n *Node) wakeUp() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// Run implements tunnel.Module. What cannot be done now is tried again; Note says what it is.
func (n *Node) Run(ctx context.Context) error {
	if err := n.kernel.release(); err != nil {
		n.log.Warn("addresses of an earlier boot are in use until the plugin adds a pod", "err", err)
	}
	n.remember()
	n.rememberNeighbours()
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		n.report(n.apply(ctx))
		select {
		case <-ctx.Done():
			return nil
		case <-n.wake:
		case <-ticker.C:
		}
	}
}

// remember takes the networks from the file that an earlier run has written.
func (n *Node) remember() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.subnets != nil {
		return
	}
	data, err := os.ReadFile(n.file())
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err == nil {
		var list cni.List
		list, err = cni.UnmarshalList(data)
		n.subnets = list.Subnets
	}
	if err != nil {
		n.log.Warn("the network configuration of an earlier run cannot be read", "file", n.file(), "err", err)
	}
}

func (n *Node) file() string { return filepath.Join(n.cfg.ConfDir, cni.ListFile) }

// apply makes everything as it should be, and returns what it cannot.
func (n *Node) apply(ctx context.Context) error {
	n.mu.Lock()
	subnets := n.subnets
	n.mu.Unlock()
	if len(subnets) == 0 {
		return errNoSubnets
	}
	conf, err := cni.NewConf(subnets)
	if err != nil {
		return err
	}
	old, err := n.read()
	if err != nil {
		return err
	}
	// While another plugin's file comes first and ours is not there, no pod uses this network: the node stays as it is.
	others := n.checkFirst()
	if others != nil && old == nil {
		return others
	}
	// The file is last: the runtime calls the plugin as soon as the file is there.
	settings := n.kernel.bridge(conf)
	if _, ok := errors.AsType[readOnlyError](settings); settings != nil && !ok {
		return settings
	}
	routes, wrong := n.wantRoutes(conf)
	direct := make([]netip.Prefix, len(routes))
	for i, r := range routes {
		direct[i] = r.to
	}
	if err := n.kernel.masquerade(conf.Bridge, subnets, direct); err != nil {
		return err
	}
	failed := n.kernel.routes(routes)
	wrong = cmp.Or(wrong, failed, n.keepNeighbours())
	if failed != nil {
		direct = nil // it is not known which of them are there
	}
	if n.cfg.Routed != nil {
		n.cfg.Routed(direct)
	}
	n.mu.Lock()
	n.routed = len(routes)
	n.mu.Unlock()
	if !n.has(cni.Program) {
		return fmt.Errorf("%s has no program %s: install the program; until then there is no network configuration",
			n.cfg.BinDir, cni.Program)
	}
	list, lacks := n.withStock(ctx, cni.List{Subnets: subnets}, old)
	if err := n.write(list, old); err != nil {
		return err
	}
	return cmp.Or(others, lacks, settings, wrong)
}

var errNoSubnets = errors.New("this node has no networks for pods: write podcidrs in [mode.edge.cni], " +
	"or have the cloud tell them (docs/cni.md)")

// has reports whether a plugin is installed.
func (n *Node) has(program string) bool {
	info, err := os.Stat(filepath.Join(n.cfg.BinDir, program))
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

// answer is what Run knows about a stock plugin.
type answer struct {
	modified time.Time // of the file, when it was asked
	size     int64
	versions []string
}

// withStock adds stock plugins to a list: portmap if it is installed, and bandwidth if the configuration asks for it,
// or did so when pods started that are still there.
// The error says what does not work. A runtime takes one version of the specification for all plugins of a list, and
// fails every pod if one of them does not speak it.
func (n *Node) withStock(ctx context.Context, list cni.List, old []byte) (cni.List, error) {
	before, _ := cni.UnmarshalList(old) // a damaged file has no stock plugin
	has := func(program string) bool { return n.has(program) || before.Chained[program] != nil }
	var ports, limits error
	// A runtime removes a pod by the plugins that the file names then. Without bandwidth, the pod's link ifb would stay.
	stays := !n.cfg.Bandwidth && before.Chained[cni.Bandwidth] != nil && n.hasPods()
	n.mu.Lock()
	n.limits = stays
	n.mu.Unlock()
	if has(cni.Portmap) {
		list, ports = n.with(ctx, list, before, cni.Portmap, "ports of the host")
	}
	switch {
	case !n.cfg.Bandwidth && !stays:
	case has(cni.Bandwidth):
		list, limits = n.with(ctx, list, before, cni.Bandwidth, "limits of bandwidth")
	default:
		limits = fmt.Errorf("limits of bandwidth do not work: %s has no program %s: install it, or remove bandwidth "+
			"from [mode.edge.cni]", n.cfg.BinDir, cni.Bandwidth)
	}
	return list, cmp.Or(ports, limits)
}

// hasPods reports whether pods have links of the plugin; true if that is not known.
func (n *Node) hasPods() bool {
	pods, err := n.kernel.attached()
	return err != nil || pods > 0
}

// with adds a stock plugin that is installed, or in the old file: the program may be missing for a moment, while it is
// upgraded, and pods that start then would never get what it is for.
func (n *Node) with(ctx context.Context, list, before cni.List, program, purpose string) (cni.List, error) {
	kept := list
	if versions := before.Chained[program]; versions != nil {
		kept = list.With(program, versions)
	}
	if !n.has(program) {
		return kept, fmt.Errorf("%s has no program %s, which %s names, so no pod starts: install %s, or "+
			"remove that file to do without %s", n.cfg.BinDir, program, n.file(), program, purpose)
	}
	versions, err := n.ask(ctx, program)
	if err != nil {
		return kept, fmt.Errorf("%s do not work: %w", purpose, err)
	}
	with := list.With(program, versions)
	if _, err := with.Marshal(); err != nil {
		return list, fmt.Errorf("%s do not work: install another %s in %s: %w", purpose, program, n.cfg.BinDir, err)
	}
	return with, nil
}

// ask returns the versions of the specification that a stock plugin speaks. It asks again when the file changes.
func (n *Node) ask(ctx context.Context, program string) ([]string, error) {
	path := filepath.Join(n.cfg.BinDir, program)
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	last := n.asked[program]
	if last.versions == nil || info.ModTime() != last.modified || info.Size() != last.size {
		versions, err := versionsOf(ctx, path)
		if errors.Is(err, fs.ErrNotExist) {
			versions, err = linkedElsewhere(), nil
		}
		if err != nil {
			return nil, err
		}
		last = answer{info.ModTime(), info.Size(), versions}
		n.asked[program] = last
	}
	return last.versions, nil
}

// linkedElsewhere returns the versions of a stock plugin whose libraries are not here: it runs on the node, but not in
// the container of the edge, which has none. Each stock plugin since 2021 (plugins v1.0.0) speaks these versions.
func linkedElsewhere() []string { return []string{"0.3.1", "0.4.0", "1.0.0"} }

// read returns the network configuration in the folder, or nil if there is none. It fails if a person has written
// the file: the edge would overwrite keys that it does not know, such as the name of another bridge.
func (n *Node) read() ([]byte, error) {
	data, err := os.ReadFile(n.file())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the network configuration: %w", err)
	}
	if foreign := cni.Foreign(data); foreign != "" {
		return nil, fmt.Errorf("%s is not of this edge, which leaves the node alone (%s): remove the file, or the table "+
			"[mode.edge.cni]", n.file(), foreign)
	}
	return append([]byte{}, data...), nil // an empty file is a file
}

// write replaces the network configuration, if it differs: a runtime reads it at any time, and must find the
// old one or the new one, whole.
func (n *Node) write(list cni.List, old []byte) error {
	data, err := list.Marshal()
	if err != nil || bytes.Equal(old, data) {
		return err
	}
	if err := os.MkdirAll(n.cfg.ConfDir, 0o755); err != nil {
		return err
	}
	if err := replace(n.cfg.ConfDir, cni.ListFile, data); err != nil {
		return fmt.Errorf("writing the network configuration: %w", err)
	}
	n.log.Info("the network configuration is written", "file", n.file(), "subnets", list.Subnets)
	return nil
}

// replace replaces a file: readers, and a machine that loses its power, have the old content or the new one. Runtimes
// read *.conf, *.conflist and *.json alone.
func replace(dir, name string, data []byte) error {
	aside := filepath.Join(dir, asideOf(name))
	err := cni.WriteDurably(aside, data)
	if err == nil {
		err = os.Rename(aside, filepath.Join(dir, name))
	}
	if err != nil {
		_ = os.Remove(aside) // what stays is overwritten by the next attempt
		return err
	}
	return syncFolder(dir)
}

func syncFolder(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// checkFirst returns an error if a runtime takes another network configuration: the file that sorts first.
func (n *Node) checkFirst() error {
	rival, err := cni.Rival(n.cfg.ConfDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("looking for other network configurations: %w", err)
	}
	if rival == "" {
		return nil
	}
	return fmt.Errorf("container runtimes take %s, which sorts before %s: remove the file of the other plugin",
		filepath.Join(n.cfg.ConfDir, rival), cni.ListFile)
}

// report keeps the outcome for Note, and logs changes of it.
func (n *Node) report(err error) {
	n.mu.Lock()
	before := n.problem
	n.problem = err
	n.mu.Unlock()
	switch {
	case err != nil && (before == nil || before.Error() != err.Error()):
		n.log.Warn("the network of the pods is not ready", "err", err)
	case err == nil && before != nil:
		n.log.Info("the network of the pods is ready")
	}
}

// Note says what an operator should mend; "" if nothing.
func (n *Node) Note() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.problem == nil {
		return ""
	}
	return n.problem.Error()
}

// Status says which networks the pods have.
func (n *Node) Status() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	texts := make([]string, len(n.subnets))
	for i, subnet := range n.subnets {
		texts[i] = subnet.String()
	}
	status := "networks of pods: " + strings.Join(texts, ", ")
	if n.cfg.Routes {
		status += fmt.Sprintf("; routes to the pods of other nodes: %d", n.routed)
	}
	if n.limits {
		status += "; limits of bandwidth stay until the node has no pods: drain it"
	}
	return status
}
