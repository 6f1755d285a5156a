package inventory

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"tunnel.example/tunnel/pkg/kube"
	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// sharedPause is how long Run waits after a change before it reads and writes the Map. With 10,000 nodes the
	// inventory has some 740 kB: each replica then writes at most 12 kB a second.
	sharedPause = time.Minute
	// retryPause is how long after a failure the next attempt begins.
	retryPause = 30 * time.Second
	// syncTime is how long one attempt may take, also the last attempt of a process that stops.
	syncTime = 10 * time.Second
	// maxConflicts is how many conflicts with other replicas end an attempt. The pause after the first conflict is
	// conflictPause; each further conflict doubles the pause.
	maxConflicts  = 5
	conflictPause = 100 * time.Millisecond
	// forgetTime is how long this replica ignores what other replicas write about a node after Forget. The other
	// replicas learn later that the node is forgotten, and their clocks may be ahead.
	forgetTime = 5 * time.Minute
	// sharedLimit is how many bytes all values of the ConfigMap may have together. Kubernetes permits 1 MiB.
	sharedLimit = 900 << 10
	// maxUnpacked is how many bytes an inventory may have after decompression.
	maxUnpacked = 64 << 20
)

// Map keeps one inventory for all replicas. *kube.ConfigMap implements it.
type Map interface {
	fmt.Stringer
	// Load reads the inventory. A missing one is no error.
	Load(ctx context.Context) (kube.Content, error)
	// Save writes the inventory if it still has the version of old. It returns the new content.
	Save(ctx context.Context, old kube.Content, text string) (kube.Content, error)
}

// sync reads what other replicas have written, and writes what this replica knows, if differ says that a write is
// needed. After a conflict it tries again. The caller holds writing.
func (i *Inventory) sync(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, syncTime)
	defer cancel()
	for n := 1; ; n++ {
		err := i.syncOnce(ctx)
		if kube.ReasonFor(err) != kube.Conflict || n == maxConflicts {
			return err
		}
		select {
		case <-time.After(conflictPause << (n - 1)):
		case <-ctx.Done():
			return err
		}
	}
}

// syncOnce is sync without another attempt after a conflict.
func (i *Inventory) syncOnce(ctx context.Context) error {
	old, err := i.Map.Load(ctx)
	if err != nil {
		return err
	}
	stored, err := unpack(old.Text)
	if err != nil {
		return fmt.Errorf("%w: %w: delete the ConfigMap, or the key in it", errContent, err)
	}
	all := i.merge(stored)
	if old.Version != "" && i.hadRoom() && !differ(stored, all) {
		i.dropForgotten()
		return nil // nothing to write, so do not call pack
	}
	text, kept, err := pack(all, sharedLimit-old.Others)
	if err != nil {
		return err
	}
	i.noteOmitted(len(all) - len(kept))
	if old.Version == "" || differ(stored, kept) {
		if _, err = i.Map.Save(ctx, old, text); err != nil {
			return err
		}
		i.log.Debug("written", "target", i.Map.String(), "bytes", len(text), "nodes", len(kept))
	}
	i.dropForgotten()
	return nil
}

// dropForgotten drops nodes that were forgotten long ago, after an attempt that has succeeded.
func (i *Inventory) dropForgotten() {
	i.mu.Lock()
	defer i.mu.Unlock()
	now := i.second()
	maps.DeleteFunc(i.forgotten, func(_ tunnel.NodeName, at time.Time) bool { return now.Sub(at) > forgetTime })
}

// hadRoom reports whether the map had room for all nodes at the last attempt.
func (i *Inventory) hadRoom() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.omitted == 0
}

// merge adds the stored records to the inventory, and returns the records to store.
func (i *Inventory) merge(stored map[tunnel.NodeName]Record) map[tunnel.NodeName]Record {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.read = true
	now := i.second()
	for n, from := range stored {
		seen := from.LastSeen
		if seen.After(now) { // the clock of another replica was ahead
			seen = now
		}
		if at, gone := i.forgotten[n]; gone && !seen.After(at.Add(forgetTime)) {
			continue
		}
		i.adoptLocked(n, from)
	}
	all := make(map[tunnel.NodeName]Record, len(i.nodes))
	for n, r := range i.nodes {
		c := *r
		if c.Connected {
			c.LastSeen = now
		}
		if !c.FactsAt.IsZero() {
			c.Replica = cmp.Or(c.Replica, i.Self)
		}
		if from, ok := stored[n]; ok {
			c.take(from, now) // even for a connected node, another replica may have newer facts
		}
		all[n] = c.shared()
	}
	return all
}

// shared returns the record without the fields that concern only one replica.
func (r *Record) shared() Record {
	s := *r
	s.Connected, s.Flapping, s.CertOld, s.began = false, false, false, [flapSessions]int64{}
	s.Sessions, s.Issued, s.IssuedAt = 0, 0, time.Time{}
	return s
}

// differ reports whether kept must be written. A newer LastSeen alone needs no write until the stored one is refresh
// older, because the LastSeen of a connected node changes each second. A stored one may also be ahead, by the clock of
// another replica.
func differ(stored, kept map[tunnel.NodeName]Record) bool {
	if len(stored) != len(kept) {
		return true
	}
	for n, k := range kept {
		s, ok := stored[n]
		if !ok || k.LastSeen.Sub(s.LastSeen).Abs() >= refresh {
			return true
		}
		if s.LastSeen = k.LastSeen; s != k {
			return true
		}
	}
	return false
}

// noteOmitted notes how many nodes have no room in the Map. It logs when this begins.
func (i *Inventory) noteOmitted(n int) {
	i.mu.Lock()
	before := i.omitted
	i.omitted = n
	i.mu.Unlock()
	switch {
	case n > 0 && before == 0:
		i.log.Warn("the inventory has no room for all nodes; it leaves out those that were not seen for the longest time",
			"target", i.Map.String(), "omitted", n)
	case n == 0 && before > 0:
		i.log.Info("the inventory has room for all nodes again", "target", i.Map.String())
	}
}

// pack returns the text of an inventory, at most limit bytes long. kept are the nodes in the text. If there is no room
// for all nodes, pack keeps the nodes that were seen last.
func pack(nodes map[tunnel.NodeName]Record, limit int) (text string, kept map[tunnel.NodeName]Record, err error) {
	kept = nodes
	for {
		if text, err = compress(kept); err != nil || len(text) <= limit {
			return text, kept, err
		}
		if len(kept) == 0 {
			return "", kept, nil
		}
		room := int(float64(len(kept)) * float64(max(limit, 0)) / float64(len(text)) * 0.95)
		kept = newest(kept, min(room, len(kept)-1))
	}
}

// newest returns the n nodes that were seen last.
func newest(nodes map[tunnel.NodeName]Record, n int) map[tunnel.NodeName]Record {
	names := slices.SortedFunc(maps.Keys(nodes), func(a, b tunnel.NodeName) int {
		return cmp.Or(nodes[b].LastSeen.Compare(nodes[a].LastSeen), strings.Compare(string(a), string(b)))
	})
	kept := make(map[tunnel.NodeName]Record, n)
	for _, name := range names[:n] {
		kept[name] = nodes[name]
	}
	return kept
}

// compress returns the text of an inventory: the content of a file, compressed by gzip.
func compress(nodes map[tunnel.NodeName]Record) (string, error) {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if err := json.NewEncoder(z).Encode(file{format, nodes}); err != nil {
		return "", err
	}
	if err := z.Close(); err != nil {
		return "", err
	}
	return b.String(), nil
}

// unpack reads what pack has written. "" is an empty inventory.
func unpack(text string) (map[tunnel.NodeName]Record, error) {
	if text == "" {
		return nil, nil
	}
	z, err := gzip.NewReader(strings.NewReader(text))
	if err != nil {
		return nil, err
	}
	plain, err := io.ReadAll(io.LimitReader(z, maxUnpacked+1))
	switch {
	case err != nil:
		return nil, err
	case len(plain) > maxUnpacked:
		return nil, fmt.Errorf("it has more than %d bytes", maxUnpacked)
	}
	return parse(plain)
}
