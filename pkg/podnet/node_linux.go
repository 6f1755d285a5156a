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

// interval is how often a Node checks the bridge, the rules and the files. Somebody may have changed them, for instance
// by flushing all nftables.
const interval = 10 * time.Second

// Config says where a Node keeps things.
type Config struct {
	ConfDir string         // folder of network configurations
	BinDir  string         // folder of CNI plugins
	Subnets []netip.Prefix // networks of the node's pods; nil: SetSubnets sets them
	Routes  bool           // keep routes to the pods of neighbours; SetNeighbours sets the neighbours
	// The Node calls Routed after each attempt to make routes, with the networks to which there are routes. May be nil.
	Routed func([]netip.Prefix)
	// Bandwidth is true if the stock plugin bandwidth is in the chain. It limits pods as their annotations say.
	Bandwidth bool
	Log       *slog.Logger
}

// Node keeps the network of one node's pods. It is a tunnel.Module.
type Node struct {
	// Set once.
	cfg    Config
	kernel kernel
	log    *slog.Logger
	wake   chan struct{} // wakeUp sends, Run receives; capacity 1: one wake-up makes Run look at everything

	asked  map[string]answer // what stock plugins have answered, by name; owned by Run
	direct []netip.Prefix    // to which networks routes have led at the last look; owned by Run

	mu      sync.Mutex // guards the following
	subnets []netip.Prefix
	// neighbours are the neighbours that the cloud told last. Before it has told any, they are those in the file.
	neighbours []Neighbour
	told       bool  // the cloud has told the neighbours, perhaps none
	routed     int   // how many networks have routes after the last attempt
	limits     bool  // bandwidth stays in the network configuration for running pods with limits
	problem    error // the error of the last attempt; nil: it has succeeded
}

// kernel is what a Node changes in the kernel. Tests replace it.
type kernel interface {
	bridge(conf *cni.Conf) error
	// masquerade hides pods with addresses in subnets behind the node, except from the networks in direct.
	masquerade(bridge string, subnets, direct []netip.Prefix) error
	links(bridge string) ([]link, error)
	// foreign returns where the routes of other programs lead, without default routes and those to the bridge.
	foreign(bridge string) ([]netip.Prefix, error)
	// routes makes exactly the routes want, and leaves those of other programs. made are the networks to which one of
	// the routes now leads; nil: nobody knows, and nothing has changed. made may be a part of want beside an error.
	routes(want []route) (made []netip.Prefix, err error)
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

// SetSubnets sets the networks that the cluster has assigned to the node's pods. Networks in the configuration have
// precedence. An empty list changes nothing: the cloud does not know the networks yet.
func (n *Node) SetSubnets(subnets []netip.Prefix) {
	if n.cfg.Subnets != nil || len(subnets) == 0 {
		return
	}
	_, err := cni.NewConf(subnets)
	for _, p := range subnets {
		if isTooLarge(p) {
			err = cmp.Or(err, fmt.Errorf("%s is larger than the pods of one node can need", p))
		}
	}
	if err != nil {
		n.log.Warn("the cloud sent unusable networks for pods; the edge keeps the previous networks", "err", err)
		return
	}
	n.mu.Lock()
	changed := !slices.Equal(n.subnets, subnets)
	n.subnets = slices.Clone(subnets)
	n.mu.Unlock()
	if !changed {
		return
	}
	n.log.Info("the cloud sent the networks for pods", "subnets", subnets)
	n.wakeUp()
}

// wakeUp makes Run call apply soon.
func (n *Node) wakeUp() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// Run implements tunnel.Module. It calls apply again and again, until ctx is done. Note says why the last call failed.
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

// apply makes the bridge, the rules, the routes and the files as the configuration says. It returns an error for the
// parts that it could not make.
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
	// If another plugin's file comes first and there is no file of ours, no pod uses this network: change nothing.
	others := n.checkFirst()
	if others != nil && old == nil {
		return others
	}
	// Write the file last: the runtime calls the plugin as soon as the file exists.
	settings := n.kernel.bridge(conf)
	if _, ok := errors.AsType[readOnlyError](settings); settings != nil && !ok {
		return settings
	}
	wrong := cmp.Or(n.route(conf), n.keepNeighbours())
	// Without its route, the network of a neighbour may be reached by a machine that knows no addresses of pods.
	if err := n.kernel.masquerade(conf.Bridge, subnets, n.direct); err != nil {
		return err
	}
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

// route makes the routes to the pods of neighbours, and tells Config.Routed. If it cannot find out which routes are
// there, they stay as they are.
func (n *Node) route(conf *cni.Conf) error {
	want, wrong, err := n.wantRoutes(conf)
	if err != nil {
		return err
	}
	made, failed := n.kernel.routes(want)
	if made == nil {
		return failed
	}
	n.direct = made
	if n.cfg.Routed != nil {
		n.cfg.Routed(made)
	}
	n.mu.Lock()
	n.routed = len(made)
	n.mu.Unlock()
	return cmp.Or(wrong, failed)
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
	modified time.Time // the modification time of the program's file when Run asked the plugin
	size     int64
	versions []string
}

// withStock adds stock plugins to a list: portmap if it is installed, and bandwidth if the configuration asks for it.
// bandwidth also stays if it is in the old file and pods still run. The error says what does not work. A runtime uses
// one version of the specification for all plugins of a list. If one plugin does not speak it, every pod fails.
func (n *Node) withStock(ctx context.Context, list cni.List, old []byte) (cni.List, error) {
	before, _ := cni.UnmarshalList(old) // a damaged file has no stock plugin
	has := func(program string) bool { return n.has(program) || before.Chained[program] != nil }
	var ports, limits error
	// A runtime removes a pod with the plugins that the file names at that time. Without bandwidth, its ifb link would
	// stay.
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

// hasPods reports whether pods have links of the plugin. If it cannot find out, it returns true.
func (n *Node) hasPods() bool {
	pods, err := n.kernel.attached()
	return err != nil || pods > 0
}

// with adds a stock plugin that is installed or in the old file. The program may be missing for a moment during an
// upgrade; pods that start without the plugin would never get its purpose.
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

// linkedElsewhere returns the versions of CNI that a dynamically linked stock plugin speaks. Such a plugin runs on the
// node. The edge cannot ask the plugin: the container of the edge has no shared libraries. All stock plugins since 2021
// (v1.0.0) speak these versions.
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
		return nil, fmt.Errorf("this edge did not write %s (%s), so it changes nothing on this node: remove the file, or "+
			"the table [mode.edge.cni]", n.file(), foreign)
	}
	return append([]byte{}, data...), nil // not nil for an empty file, since nil means that there is no file
}

// write replaces the network configuration if it differs from old. A runtime may read the file at any time, and finds
// either the whole old file or the whole new one.
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

// replace replaces a file. Readers find either the old or the new content, also after a power loss. It first writes a
// file beside it, which runtimes ignore: they read only *.conf, *.conflist and *.json.
func replace(dir, name string, data []byte) error {
	aside := filepath.Join(dir, asideOf(name))
	err := cni.WriteDurably(aside, data)
	if err == nil {
		err = os.Rename(aside, filepath.Join(dir, name))
	}
	if err != nil {
		_ = os.Remove(aside) // if the file stays, the next attempt overwrites it
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

// checkFirst returns an error if a runtime uses another network configuration, whose name sorts before ours.
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

// report keeps err, the outcome of apply, for Note. It logs when the outcome changes.
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

// Note says what an operator should repair; "": nothing.
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
