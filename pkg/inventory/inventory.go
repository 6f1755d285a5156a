// Package inventory remembers the nodes of a cloud, so that an operator sees which nodes are missing.
//
//	nodes, err := inventory.New("/var/lib/tunnel-cloud/nodes.json", log)
//	directory.Watcher = nodes           // sessions come and go
//	nodes.Issued("edge1", chain)        // a certificate was made
//	all := nodes.All()                  // every node that was ever connected, and not forgotten
//	err = nodes.Run(ctx)                // keeps the file
//
// A replica also remembers the nodes that other replicas hold: their names and when they were last seen.
//
// A node enters the inventory when it has proven its name: by a session, or by the proof for a certificate.
// It leaves by [Inventory.Forget] only, or when maxNodes other nodes were seen later.
//
// The file is a convenience, not a source of truth: nobody gets access by it, and a cloud starts without it.
// Each replica has a file of its own, about the sessions that this replica has had.
// The inventory holds no secret.
package inventory

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// writePause is how long changes are gathered before the file is written again. The file of 10,000 nodes
	// has 3 MB: then the disk gets 100 kB a second at most.
	writePause = 30 * time.Second
	// refresh is how often the file is written while nodes are connected and nothing changes, so that a cloud
	// that was killed knows when it last saw them.
	refresh = 10 * time.Minute
	// gather is how long changes at the other replicas are gathered: thousands of nodes may move at once.
	gather = time.Second
	// maxNodes bounds the memory: with a token for any node, the holder of the token chooses names.
	maxNodes = 100_000
	// maxSoftware and maxEnded bound texts of a node, in bytes.
	maxSoftware = 64
	maxEnded    = 200
)

// Record is what the inventory knows of a node. Times are this machine's, in UTC and whole seconds.
type Record struct {
	FirstSeen time.Time `json:"first_seen"`
	LastSeen  time.Time `json:"last_seen"`             // while the node is connected: now
	FactsAt   time.Time `json:"facts_at,omitzero"`     // of Remote, Software, Ended and Replica
	Connected bool      `json:"-"`                     // the node has a session with this replica now
	Sessions  int       `json:"sessions,omitempty"`    // with this replica, since first_seen
	Remote    string    `json:"remote,omitempty"`      // address of the newest session
	Software  string    `json:"software,omitempty"`    // of the newest session
	Ended     string    `json:"ended,omitempty"`       // why the newest session that has ended did so
	Issued    int       `json:"issued,omitempty"`      // certificates that this replica has had made
	IssuedAt  time.Time `json:"issued_at,omitzero"`    // the newest of them
	CertEnds  time.Time `json:"cert_ends,omitzero"`    // end of the newest of them, or of the one last shown
	Replica   string    `json:"replica,omitempty"`     // that has told the facts; "": this one
	CertShown string    `json:"certificate,omitempty"` // serial number of the newest of them, in hexadecimal
}

// Others knows which nodes are connected to any replica. peers.Peers implements it.
type Others interface {
	tunnel.Nodes
	// Changed returns a channel that is closed when a node comes or goes.
	Changed() <-chan struct{}
}

// Inventory remembers nodes. It is the module "inventory".
type Inventory struct {
	// Set once.
	path   string // "": only memory
	log    *slog.Logger
	now    func() time.Time
	unread error // why the file was not read; nil: it was, or there is none

	// Others knows the nodes of every replica, so that this replica misses the nodes of another replica
	// when that has gone, too; nil: there are no other replicas. Set before Run.
	Others Others

	mu      sync.Mutex // guards the following; taken inside the Directory's lock, never around it
	nodes   map[tunnel.NodeName]*Record
	changed tunnel.Change // of nodes
	// elsewhere are the nodes that any replica held when noteOthers looked last.
	elsewhere []tunnel.NodeName
	failed    error // why the file could not be written; nil: it was
}

var (
	_ tunnel.Module         = (*Inventory)(nil)
	_ tunnel.SessionWatcher = (*Inventory)(nil)
)

// New returns an inventory with the nodes of the file at path. path may be "": then the inventory is lost
// when the process ends. New changes no file. Run sets a file aside that is not an inventory.
func New(path string, log *slog.Logger) *Inventory {
	i := &Inventory{path: path, log: log, now: time.Now}
	i.nodes, i.unread = load(path)
	return i
}

// Name implements tunnel.Module.
func (i *Inventory) Name() string { return "inventory" }

// Note says why the file is out of date, for /readyz.
func (i *Inventory) Note() string {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.failed == nil {
		return ""
	}
	return "the inventory of nodes cannot be written: " + i.failed.Error()
}

// Attached implements tunnel.SessionWatcher.
func (i *Inventory) Attached(s *tunnel.Session) {
	i.mu.Lock()
	defer i.mu.Unlock()
	r := i.recordLocked(s.Node)
	r.Connected, r.Remote, r.Software, r.Replica, r.FactsAt = true, s.Remote, cut(s.Software, maxSoftware), "", r.LastSeen
	r.Sessions++
	noteProof(r, s)
	i.changed.Notify()
}

// Detached implements tunnel.SessionWatcher.
func (i *Inventory) Detached(s *tunnel.Session) {
	i.mu.Lock()
	defer i.mu.Unlock()
	r := i.recordLocked(s.Node)
	r.Connected, r.Ended, r.FactsAt = false, "", r.LastSeen
	if why := s.EndedBecause.Load(); why != nil {
		r.Ended = cut(*why, maxEnded)
	}
	noteProof(r, s)
	i.changed.Notify()
}

// cut returns the first most bytes of a text, without a broken character at the end.
func cut(s string, most int) string {
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "")
	}
	return s
}

// noteProof stores the end of the certificate that proves the session's node.
func noteProof(r *Record, s *tunnel.Session) {
	if ends := s.CertificateEnds.Load(); ends != 0 {
		r.CertEnds = time.Unix(ends, 0).UTC()
	}
}

// Adopt stores what another replica knows of a node that it misses, as far as that is newer. The numbers of sessions
// and certificates stay those of this replica. A time in the future, by the other machine's clock, counts as now.
func (i *Inventory) Adopt(node tunnel.NodeName, from Record) {
	i.mu.Lock()
	defer i.mu.Unlock()
	now := i.second()
	for _, t := range []*time.Time{&from.FirstSeen, &from.LastSeen, &from.FactsAt} {
		if t.After(now) {
			*t = now
		}
	}
	r := i.nodes[node]
	switch {
	case r == nil:
		r = i.recordLocked(node)
		r.FirstSeen, r.LastSeen = from.FirstSeen, from.LastSeen
	case r.Connected:
		return
	}
	if from.FirstSeen.Before(r.FirstSeen) {
		r.FirstSeen = from.FirstSeen
	}
	if from.LastSeen.After(r.LastSeen) {
		r.LastSeen = from.LastSeen
	}
	if from.FactsAt.After(r.FactsAt) {
		r.FactsAt, r.Replica = from.FactsAt, from.Replica
		r.Remote, r.Software, r.Ended = from.Remote, cut(from.Software, maxSoftware), cut(from.Ended, maxEnded)
	}
	if from.CertEnds.After(r.CertEnds) {
		r.CertEnds = from.CertEnds
	}
	i.changed.Notify()
}

// Issued notes that node has got a certificate.
func (i *Inventory) Issued(node tunnel.NodeName, leaf *x509.Certificate) {
	i.mu.Lock()
	defer i.mu.Unlock()
	r := i.recordLocked(node)
	r.Issued++
	r.IssuedAt, r.CertEnds, r.CertShown = i.second(), leaf.NotAfter.UTC(), leaf.SerialNumber.Text(16)
	i.changed.Notify()
}

// recordLocked returns the record of a node that was seen just now. The caller holds mu.
func (i *Inventory) recordLocked(node tunnel.NodeName) *Record {
	now := i.second()
	r := i.nodes[node]
	if r == nil {
		if len(i.nodes) >= maxNodes {
			i.forgetOldestLocked()
		}
		r = &Record{FirstSeen: now}
		i.nodes[node] = r
	}
	r.LastSeen = now
	return r
}

// second returns the time in whole seconds.
func (i *Inventory) second() time.Time { return i.now().UTC().Truncate(time.Second) }

// forgetOldestLocked removes the nodes that were not seen for the longest time: one in a hundred, so that the next
// new nodes find room without a search. The caller holds mu.
func (i *Inventory) forgetOldestLocked() {
	type missing struct {
		node tunnel.NodeName
		seen int64
	}
	var all []missing
	for n, r := range i.nodes {
		if !r.Connected {
			all = append(all, missing{n, r.LastSeen.Unix()})
		}
	}
	slices.SortFunc(all, func(a, b missing) int { return cmp.Compare(a.seen, b.seen) })
	for _, m := range all[:min(len(all), maxNodes/100)] {
		delete(i.nodes, m.node)
	}
}

// ErrConnected is why a node cannot be forgotten.
var ErrConnected = errors.New("the node is connected: stop its edge first, or revoke it with tunnel token revoke")

// Forget removes a node. It reports whether the inventory had the node. A connected node stays.
func (i *Inventory) Forget(node tunnel.NodeName) (had bool, err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	r := i.nodes[node]
	switch {
	case r == nil:
		return false, nil
	case r.Connected:
		return true, ErrConnected
	}
	delete(i.nodes, node)
	i.elsewhere = slices.DeleteFunc(i.elsewhere, func(n tunnel.NodeName) bool { return n == node })
	i.changed.Notify()
	return true, nil
}

// All returns a copy of every record.
func (i *Inventory) All() map[tunnel.NodeName]Record {
	now, names, records := i.copied()
	all := make(map[tunnel.NodeName]Record, len(names))
	for k, c := range records {
		if c.Connected {
			c.LastSeen = now
		}
		all[names[k]] = c
	}
	return all
}

// copied returns the names and a copy of each record. It is short, since sessions that begin wait for mu.
func (i *Inventory) copied() (now time.Time, names []tunnel.NodeName, records []Record) {
	i.mu.Lock()
	defer i.mu.Unlock()
	names, records = make([]tunnel.NodeName, 0, len(i.nodes)), make([]Record, 0, len(i.nodes))
	for n, r := range i.nodes {
		names, records = append(names, n), append(records, *r)
	}
	return i.second(), names, records
}

// Names returns the names of all nodes, in no order.
func (i *Inventory) Names() []tunnel.NodeName {
	i.mu.Lock()
	defer i.mu.Unlock()
	all := make([]tunnel.NodeName, 0, len(i.nodes))
	for n := range maps.Keys(i.nodes) {
		all = append(all, n)
	}
	return all
}

// noteOthers notes that the nodes of the other replicas are seen now. The channel that it returns is closed when a
// node comes or goes there; nil without other replicas.
func (i *Inventory) noteOthers() <-chan struct{} {
	if i.Others == nil {
		return nil
	}
	changed := i.Others.Changed()
	names := i.Others.Connected()
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, n := range slices.Concat(i.elsewhere, names) { // a node that has just gone was seen a moment ago
		// The nodes of a full replica leave the nodes of this one alone.
		if i.nodes[n] != nil || len(i.nodes) < maxNodes {
			i.recordLocked(n)
		}
	}
	i.elsewhere = slices.Clone(names)
	if len(names) > 0 {
		i.changed.Notify()
	}
	return changed
}

// Run implements tunnel.Module. It writes the file when nodes have changed, and a last time when ctx is done.
func (i *Inventory) Run(ctx context.Context) error {
	if i.unread != nil {
		i.log.Warn("the inventory of nodes cannot be used; it starts empty", "target", i.path, "err", i.unread)
		if errors.Is(i.unread, errContent) {
			os.Rename(i.path, i.path+".bad") //nolint:errcheck // if it fails, so does the write that would replace the file
		}
	}
	i.mu.Lock()
	changed := i.changed.Next()
	i.mu.Unlock()
	elsewhere := i.noteOthers()
	var gathered <-chan time.Time // when the nodes of the other replicas are noted next; nil: not soon
	due, written := time.After(refresh), time.Now().Add(-writePause)
	for {
		select {
		case <-changed:
			changed, due = nil, time.After(time.Until(written.Add(writePause)))
		case <-elsewhere:
			elsewhere, gathered = nil, time.After(gather)
		case <-gathered:
			gathered, elsewhere = nil, i.noteOthers()
		case <-due:
			elsewhere, gathered = i.noteOthers(), nil
			changed = i.write()
			due, written = time.After(refresh), time.Now()
		case <-ctx.Done():
			i.write()
			return nil
		}
	}
}

// write writes the file. It logs the first failure, and the first success after a failure. The channel that
// it returns is closed at the next change.
func (i *Inventory) write() <-chan struct{} {
	i.mu.Lock()
	changed := i.changed.Next()
	i.mu.Unlock()
	if i.path == "" {
		return changed
	}
	err := save(i.path, i.All())
	i.mu.Lock()
	before := i.failed
	i.failed = err
	i.mu.Unlock()
	switch {
	case err != nil && before == nil:
		i.log.Warn("the inventory of nodes cannot be written", "target", i.path, "err", err)
	case err == nil && before != nil:
		i.log.Info("the inventory of nodes can be written again", "target", i.path)
	}
	return changed
}
