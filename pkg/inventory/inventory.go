// Package inventory remembers the nodes of a cloud, so that an operator sees which nodes are missing.
//
//	nodes := inventory.New("/var/lib/tunnel-cloud/nodes.json", log)
//	directory.Watcher = nodes                      // is told when sessions begin and end
//	nodes.Issued("edge1", leaf)                    // when the cloud has issued a certificate
//	all := nodes.All()                             // every node that was ever connected, and not forgotten
//	registry.MustRegister(nodes.Collector(nil, 0)) // how many are connected, missing, flapping
//	err := nodes.Run(ctx)                          // keeps the file
//
// A replica also remembers the nodes that other replicas hold: their names and when they were last seen.
//
// A node enters the inventory when it has proven its name: by a session, or by the proof for a certificate.
// It leaves only by [Inventory.Forget], or when maxNodes other nodes were seen later.
//
// In place of a file, a [Map] may keep one inventory for all replicas, such as a ConfigMap. Each replica reads what the
// other replicas have written. Then the numbers of sessions and certificates count only since the start of the replica.
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
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/kube"
	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// writePause is how long Run waits after a change before it writes the file, so that one write covers many
	// changes. With 10,000 nodes the file has 3 MB: Run then writes at most 100 kB a second.
	writePause = 30 * time.Second
	// refresh is how often Run writes the file while nodes are connected and nothing changes. So a cloud that was
	// killed still knows when it last saw its nodes.
	refresh = 10 * time.Minute
	// gather is how long Run waits after a change at the other replicas: thousands of nodes may move at once.
	gather = time.Second
	// maxNodes is how many nodes the inventory holds. With a token for any node, its holder can choose any names.
	maxNodes    = 100_000
	maxSoftware = 64  // the longest Record.Software, in bytes
	maxEnded    = 200 // the longest Record.Ended, in bytes
)

// Record is what the inventory knows of a node. Times are this machine's, in UTC and whole seconds.
type Record struct {
	FirstSeen time.Time `json:"first_seen"`
	LastSeen  time.Time `json:"last_seen"`             // while the node is connected: now
	FactsAt   time.Time `json:"facts_at,omitzero"`     // when Remote, Software, Ended and Replica were set
	Connected bool      `json:"-"`                     // the node has a session with this replica now
	Sessions  int       `json:"sessions,omitempty"`    // how many sessions with this replica began since FirstSeen
	Remote    string    `json:"remote,omitempty"`      // address of the edge in its newest session
	Software  string    `json:"software,omitempty"`    // version of the edge in its newest session
	Services  bool      `json:"services,omitempty"`    // the edge of the newest session serves Services
	Ended     string    `json:"ended,omitempty"`       // why the last session ended
	Issued    int       `json:"issued,omitempty"`      // how many certificates this replica has issued to the node
	IssuedAt  time.Time `json:"issued_at,omitzero"`    // when this replica issued the last certificate
	CertEnds  time.Time `json:"cert_ends,omitzero"`    // end of the certificate that was last issued or shown
	Replica   string    `json:"replica,omitempty"`     // the replica that had the newest session; "": this one
	CertShown string    `json:"certificate,omitempty"` // serial number of the last certificate, in hexadecimal
	CertBy    string    `json:"cert_by,omitempty"`     // the CA that signed the last certificate
	CertFrom  time.Time `json:"cert_starts,omitzero"`
	// CertTrusts are the CAIDs of the CAs by which the edge verified the cloud when it got the last certificate, with
	// blanks in between; "": not known.
	CertTrusts string `json:"cert_trusts,omitempty"`
	// CertOld is true if another replica has held the node since, and may have renewed the last certificate.
	CertOld  bool `json:"cert_old,omitempty"`
	Flapping bool `json:"-"` // four sessions with this replica began within ten minutes

	// began is when the newest sessions with this replica began, the newest first, in seconds since 1970; 0: none.
	began [flapSessions]int64
}

// Others knows which nodes are connected to any replica. peers.Peers implements it.
type Others interface {
	tunnel.Nodes
	// ServesServices reports whether a node is connected now, and if so whether its edge serves Services.
	ServesServices(tunnel.NodeName) (connected, serves bool)
	// Changed returns a channel that is closed when a node comes or goes.
	Changed() <-chan struct{}
}

// Inventory remembers nodes. It is the module "inventory".
type Inventory struct {
	// Set once.
	path string // "": only memory
	log  *slog.Logger
	now  func() time.Time

	// Others knows the nodes of every replica. So when another replica has gone, this replica still knows which nodes
	// are missing. nil: there are no other replicas. Set before Run.
	Others Others

	// Map keeps one inventory for all replicas, in place of a file; nil: there is no Map. Self is the name of this
	// replica in Map. Both are set before Run.
	Map  Map
	Self string

	mu      sync.Mutex // guards the following; taken inside the Directory's lock, never around it
	nodes   map[tunnel.NodeName]*Record
	changed tunnel.Change // nodes has changed
	// elsewhere are the nodes that any replica held when noteOthers last looked.
	elsewhere []tunnel.NodeName
	// ended are the nodes whose session with this replica has ended since noteOthers began; nil: noteOthers does not run.
	ended  map[tunnel.NodeName]bool
	unread error // why nodes of the file may be missing; nil: none is missing
	failed error // why the last write of the file failed; nil: it succeeded
	left   bool  // another process writes the file: see Leave
	// With a Map only.
	read      bool                          // this process has read the Map
	omitted   int                           // how many nodes had no room in the Map
	forgotten map[tunnel.NodeName]time.Time // forgotten nodes that other replicas may still write, and when

	writing sync.Mutex // held while the file is written; taken before mu
}

var (
	_ tunnel.Module         = (*Inventory)(nil)
	_ tunnel.SessionWatcher = (*Inventory)(nil)
)

// New returns an inventory with the nodes of the file at path. path may be "": then the inventory is lost
// when the process ends. New changes no file. If the file is not an inventory, Run renames it (badSuffix).
func New(path string, log *slog.Logger) *Inventory {
	i := &Inventory{path: path, log: log, now: time.Now}
	i.nodes, i.unread = load(path)
	return i
}

// Name implements tunnel.Module.
func (i *Inventory) Name() string { return "inventory" }

// Note says why the file is out of date or was not read, for /readyz.
func (i *Inventory) Note() string {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch {
	case errors.Is(i.unread, errContent) || errors.Is(i.unread, errAside):
		return fmt.Sprintf("the inventory of nodes lacks the nodes in %s: stop the cloud, repair that file and rename "+
			"it to %s, "+
			"or remove it; then start the cloud", i.path+badSuffix, i.path)
	case i.unread != nil:
		return fmt.Sprintf("the inventory of nodes cannot be read: %v: mend the file or remove it, and restart the cloud",
			i.unread)
	case i.failed != nil:
		return "the inventory of nodes cannot be written: " + i.failed.Error()
	case i.omitted > 0:
		return fmt.Sprintf("the inventory has no room for %d nodes: remove those that are gone by tunnel forget", i.omitted)
	}
	return ""
}

// Attached implements tunnel.SessionWatcher.
func (i *Inventory) Attached(s *tunnel.Session) {
	i.mu.Lock()
	defer i.mu.Unlock()
	r := i.recordLocked(s.Node)
	r.Connected, r.Remote, r.Software, r.Replica, r.FactsAt = true, s.Remote, cut(s.Software, maxSoftware), "", r.LastSeen
	r.Services = s.Services
	r.Sessions++
	r.noteBegan(r.LastSeen)
	noteProof(r, s)
	i.changed.Notify()
}

// Detached implements tunnel.SessionWatcher.
func (i *Inventory) Detached(s *tunnel.Session) {
	i.mu.Lock()
	defer i.mu.Unlock()
	r := i.recordLocked(s.Node)
	r.Connected, r.Ended, r.FactsAt = false, "", r.LastSeen
	if i.ended != nil {
		i.ended[s.Node] = true
	}
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

// noteProof stores the certificate that proves the session's node.
func noteProof(r *Record, s *tunnel.Session) {
	if ends := s.CertificateEnds.Load(); ends != 0 {
		r.CertEnds = time.Unix(ends, 0).UTC()
	}
	if c := s.Certificate.Load(); c != nil {
		r.note(*c)
	}
}

// note stores a certificate of the node.
func (r *Record) note(c tunnel.Certificate) {
	if c.Serial != r.CertShown {
		r.CertTrusts = ""
	}
	r.CertShown, r.CertBy, r.CertFrom, r.CertEnds, r.CertOld = c.Serial, c.Signer, c.Starts, c.Ends, false
}

// Adopt stores from, what another replica knows of a missing node, as far as it is newer than what this replica knows.
// The numbers of sessions and certificates of this replica stay. If the other machine's clock is ahead, a time in the
// future counts as now.
func (i *Inventory) Adopt(node tunnel.NodeName, from Record) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.adoptLocked(node, from)
	i.changed.Notify()
}

// adoptLocked is Adopt for a caller that holds mu. It does not notify changed.
func (i *Inventory) adoptLocked(node tunnel.NodeName, from Record) {
	now := i.second()
	r := i.nodes[node]
	switch {
	case r == nil:
		r = i.recordLocked(node)
		r.FirstSeen, r.LastSeen = from.FirstSeen, time.Time{}
	case r.Connected:
		r.FirstSeen = earlier(r.FirstSeen, from.FirstSeen)
		r.takeTrusts(from)
		return
	}
	r.take(from, now)
}

// take copies the newer facts of from, another record of the same node. A time in the future counts as now.
func (r *Record) take(from Record, now time.Time) {
	for _, t := range []*time.Time{&from.FirstSeen, &from.LastSeen, &from.FactsAt} {
		if t.After(now) {
			*t = now
		}
	}
	r.FirstSeen = earlier(r.FirstSeen, from.FirstSeen)
	if from.LastSeen.After(r.LastSeen) {
		r.LastSeen = from.LastSeen
	}
	// If both facts are of the same second, all replicas prefer the facts with the greater replica name. Otherwise each
	// replica would undo what another has written.
	newer := from.FactsAt.Compare(r.FactsAt)
	if newer > 0 || newer == 0 && from.Replica > r.Replica {
		r.FactsAt, r.Replica = from.FactsAt, from.Replica
		r.Remote, r.Software, r.Ended = from.Remote, cut(from.Software, maxSoftware), cut(from.Ended, maxEnded)
		r.Services = from.Services
	}
	if from.certificateIsNewer(r) {
		r.CertEnds, r.CertFrom, r.CertShown, r.CertBy = from.CertEnds, from.CertFrom, from.CertShown, from.CertBy
		r.CertTrusts, r.CertOld = from.CertTrusts, false
	}
	r.takeTrusts(from)
}

// certificateIsNewer reports whether the certificate of r is newer than the certificate of than. The certificate that
// begins later is newer, even if it ends earlier. Records of old versions do not say when a certificate begins.
func (r *Record) certificateIsNewer(than *Record) bool {
	if r.CertFrom.IsZero() || than.CertFrom.IsZero() || r.CertFrom.Equal(than.CertFrom) {
		return r.CertEnds.After(than.CertEnds)
	}
	return r.CertFrom.After(than.CertFrom)
}

// takeTrusts copies CertTrusts of from, if both records have the same certificate. This replica lacks it if it has
// started after the edge has said it.
func (r *Record) takeTrusts(from Record) {
	if r.CertTrusts == "" && from.CertShown == r.CertShown {
		r.CertTrusts = from.CertTrusts
	}
}

// earlier returns the earlier of two times.
func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// Issued notes that node has got a certificate.
func (i *Inventory) Issued(node tunnel.NodeName, leaf *x509.Certificate) {
	i.mu.Lock()
	defer i.mu.Unlock()
	r := i.recordLocked(node)
	r.Issued++
	r.IssuedAt = i.second()
	r.note(tunnel.CertificateOf(leaf))
	i.changed.Notify()
}

// Trusts records the ids of the CAs by which node verified the cloud when it got its latest certificate (see Issued).
func (i *Inventory) Trusts(node tunnel.NodeName, cas []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.recordLocked(node).CertTrusts = strings.Join(cas, " ")
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
	delete(i.forgotten, node)
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

// ErrConnected is the error of Forget for a connected node.
var ErrConnected = errors.New("the node is connected: stop its edge first, or revoke it with tunnel token revoke")

// ErrLeft is the error of Forget if another process is taking over from this process.
var ErrLeft = errors.New("a new process of the cloud takes over: run the command again")

// Forget removes a node. It reports whether the inventory had the node. A connected node stays.
func (i *Inventory) Forget(node tunnel.NodeName) (had bool, err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	r := i.nodes[node]
	switch {
	case i.left:
		return r != nil, ErrLeft
	case r != nil && r.Connected:
		return true, ErrConnected
	}
	if i.Map != nil { // another replica may have stored the node
		if i.forgotten == nil {
			i.forgotten = make(map[tunnel.NodeName]time.Time)
		}
		i.forgotten[node] = i.second()
		i.changed.Notify()
	}
	if r == nil {
		return false, nil
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
	now = i.second()
	for n, r := range i.nodes {
		c := *r
		c.Flapping, c.began = r.flaps(now), [flapSessions]int64{} // a copy needs only the verdict
		names, records = append(names, n), append(records, c)
	}
	return now, names, records
}

// Has reports whether the inventory has a node.
func (i *Inventory) Has(node tunnel.NodeName) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.nodes[node] != nil
}

// Known reports whether the inventory has been read. If it has not, it may lack nodes that were connected before.
func (i *Inventory) Known() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.Map != nil {
		return i.read
	}
	return i.unread == nil
}

// Len returns how many nodes the inventory has.
func (i *Inventory) Len() int {
	i.mu.Lock()
	defer i.mu.Unlock()
	return len(i.nodes)
}

// ServeServices returns the names of all nodes whose edges serve Services, in no order.
func (i *Inventory) ServeServices() []tunnel.NodeName {
	i.mu.Lock()
	defer i.mu.Unlock()
	all := make([]tunnel.NodeName, 0, len(i.nodes))
	for n, r := range i.nodes {
		if r.Services {
			all = append(all, n)
		}
	}
	return all
}

// noteOthers notes that all nodes of the other replicas are seen now. It returns a channel that is closed when a node
// of another replica comes or goes; nil: there are no other replicas.
func (i *Inventory) noteOthers() <-chan struct{} {
	if i.Others == nil {
		return nil
	}
	changed := i.Others.Changed()
	i.mu.Lock()
	i.ended = make(map[tunnel.NodeName]bool)
	i.mu.Unlock()
	names := i.Others.Connected() // without mu, since it takes the lock of the Directory
	serve := make(map[tunnel.NodeName]bool, len(names))
	for _, n := range names {
		// A node whose session has ended since Connected counts as before.
		if connected, serves := i.Others.ServesServices(n); connected {
			serve[n] = serves
		}
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, n := range slices.Concat(i.elsewhere, names) { // a node that has just gone was seen a moment ago
		// When the inventory is full, nodes of other replicas do not displace nodes of this replica.
		if i.nodes[n] != nil || len(i.nodes) < maxNodes {
			i.recordLocked(n)
		}
	}
	for _, n := range names { // names also has the nodes of this replica, which are Connected
		if r := i.nodes[n]; r != nil && !r.Connected && !i.ended[n] {
			r.CertOld = true
			if serves, ok := serve[n]; ok {
				r.Services = serves
			}
		}
	}
	i.ended, i.elsewhere = nil, slices.Clone(names)
	if len(names) > 0 {
		i.changed.Notify()
	}
	return changed
}

// Run implements tunnel.Module. It writes the file when nodes have changed, and a last time when ctx is done.
func (i *Inventory) Run(ctx context.Context) error {
	i.mu.Lock()
	unread, changed := i.unread, i.changed.Next()
	i.mu.Unlock()
	switch {
	case errors.Is(unread, errAside):
		i.log.Warn("the inventory of nodes lacks the nodes in a damaged file", "target", i.path+badSuffix, "err", unread)
	case unread != nil:
		i.log.Warn("the inventory of nodes cannot be used; it starts empty", "target", i.path, "err", unread)
		// An older damaged file stays: it has what the inventory lacks.
		if _, err := os.Lstat(i.path + badSuffix); errors.Is(unread, errContent) && errors.Is(err, fs.ErrNotExist) {
			os.Rename(i.path, i.path+badSuffix) //nolint:errcheck // if it fails, so does the write that would replace the file
		}
	}
	elsewhere := i.noteOthers()
	var gathered <-chan time.Time // when to call noteOthers next; nil: no node of another replica has changed
	pause := writePause
	if i.Map != nil {
		pause = sharedPause
	}
	next := refresh
	if i.Map != nil { // New has not read the Map: read it at once
		next = 0
	}
	due, written := time.After(next), time.Now().Add(-pause)
	for {
		select {
		case <-changed:
			// After a failure, next is shorter than pause.
			changed, due = nil, time.After(time.Until(written.Add(min(pause, next))))
		case <-elsewhere:
			elsewhere, gathered = nil, time.After(gather)
		case <-gathered:
			gathered, elsewhere = nil, i.noteOthers()
		case <-due:
			elsewhere, gathered = i.noteOthers(), nil
			changed = i.write(ctx)
			next = i.next()
			due, written = time.After(next), time.Now()
		case <-ctx.Done():
			i.write(context.WithoutCancel(ctx))
			return nil
		}
	}
}

// Leave writes the file a last time. From then on, another process, which is about to take over, writes the file.
func (i *Inventory) Leave() {
	i.writing.Lock()
	defer i.writing.Unlock()
	i.mu.Lock()
	i.left = true
	i.mu.Unlock()
	i.save(context.Background())
}

// Return undoes Leave: the other process has not taken over.
func (i *Inventory) Return() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.left = false
	i.changed.Notify()
}

// Reload reads the file again after another process has left the file to this one. Connected nodes stay as they are.
// Call it before Run.
func (i *Inventory) Reload() {
	if i.path == "" {
		return
	}
	nodes, unread := load(i.path)
	i.mu.Lock()
	defer i.mu.Unlock()
	for n, r := range i.nodes {
		if r.Connected {
			nodes[n] = r
		}
	}
	i.nodes, i.unread = nodes, unread
}

// write writes the file, unless Leave has left it to another process. It returns a channel that is closed at the next
// change.
func (i *Inventory) write(ctx context.Context) <-chan struct{} {
	i.writing.Lock()
	defer i.writing.Unlock()
	i.mu.Lock()
	changed, left := i.changed.Next(), i.left
	i.mu.Unlock()
	if !left {
		i.save(ctx)
	}
	return changed
}

// next returns when the inventory is written next if nothing changes.
func (i *Inventory) next() time.Duration {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.Map != nil && i.failed != nil {
		return retryPause
	}
	return refresh
}

// unreadable returns why the file could not be read, if its content may still be good. Then a write would lose its
// nodes.
func (i *Inventory) unreadable() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if errors.Is(i.unread, errContent) || errors.Is(i.unread, errAside) {
		return nil
	}
	return i.unread
}

// save writes the file. It logs the first failure, and the first success after a failure. The caller holds writing.
func (i *Inventory) save(ctx context.Context) {
	var err error
	target := i.path
	switch {
	case i.Map != nil:
		target = i.Map.String()
		if err = i.sync(ctx); err != nil && ctx.Err() != nil {
			return // ctx is done, and Run makes a last attempt
		}
		err = kube.Explain(err)
	case i.path != "":
		if err = i.unreadable(); err == nil {
			err = save(i.path, i.All())
		}
	default:
		return
	}
	i.mu.Lock()
	before := i.failed
	i.failed = err
	i.mu.Unlock()
	switch {
	case err != nil && before == nil:
		i.log.Warn("the inventory of nodes cannot be written", "target", target, "err", err)
	case err == nil && before != nil:
		i.log.Info("the inventory of nodes can be written again", "target", target)
	}
}
