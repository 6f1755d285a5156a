package hub

import (
	"bytes"
	"cmp"
	"compress/flate"
	"maps"
	"slices"
	"sync"

	"google.golang.org/protobuf/encoding/protowire"
)

const (
	// maxChanges is the most bytes of changes in a batch, before they are compressed. With its frame, a batch fits
	// into the largest message that a session takes (64 KiB and 1 KiB), even if nothing is compressed.
	maxChanges = 64 << 10
	// minDeflate is the fewest bytes of changes that are worth compressing.
	minDeflate = 256
)

// batch is a batch for all edges with the same position, or for one edge.
type batch struct {
	behind position // set once: the position of an edge that has got the batch

	once     sync.Once // compresses changes
	changes  []byte
	deflated bool
}

// key identifies a batch: edges at one position get equal batches as long as the hub has the same seq.
type key struct {
	position
	seq uint64
}

// ownBatch returns a batch with changes from the start of a list, for one edge, and the changes that found no room.
func ownBatch(list []*change) (_ *batch, rest []*change) {
	b := new(batch)
	for len(list) > 0 && b.append(list[0]) {
		list = list[1:]
	}
	return b, list
}

// cached is how many batches the hub keeps, so that other edges get the same batch. A change reaches all edges at
// nearly the same time.
const cached = 32

// cache holds the last batches.
type cache struct {
	batches map[key]*batch
	order   [cached]key // a ring
	next    int         // index of the oldest one
}

// batchLocked returns the batch for a position. The caller holds mu.
func (h *Hub) batchLocked(at position) *batch {
	k := key{at, h.seq}
	if b := h.cache.batches[k]; b != nil {
		return b
	}
	b := &batch{behind: at}
	if at.buckets.first() >= 0 {
		h.fillBucketsLocked(b)
	} else {
		h.fillChangesLocked(b)
	}
	if h.cache.batches == nil {
		h.cache.batches = make(map[key]*batch, cached)
	}
	delete(h.cache.batches, h.cache.order[h.cache.next])
	h.cache.batches[k], h.cache.order[h.cache.next] = b, k
	h.cache.next = (h.cache.next + 1) % cached
	return b
}

// fillBucketsLocked fills a batch with whole buckets. The caller holds mu.
func (h *Hub) fillBucketsLocked(b *batch) {
	at := &b.behind
	for n := at.buckets.first(); n >= 0; n = at.buckets.first() {
		if at.after == "" {
			if len(b.changes) > maxChanges-wholeSize {
				break
			}
			b.changes = appendWhole(b.changes, n)
		}
		for _, p := range slices.Sorted(maps.Keys(h.buckets[n])) {
			if p <= at.after || h.buckets[n][p].isApart() {
				continue
			}
			if !b.append(h.buckets[n][p]) {
				return
			}
			at.after = p
		}
		at.buckets.remove(n)
		at.after = ""
	}
}

// fillChangesLocked fills a batch with the changes after the cursor, up to the goal. The caller holds mu.
func (h *Hub) fillChangesLocked(b *batch) {
	at := &b.behind
	from, _ := slices.BinarySearchFunc(h.changes, at.cursor+1, func(c *change, seq uint64) int {
		return cmp.Compare(c.seq, seq)
	})
	for _, c := range h.changes[from:] {
		if c.seq > at.goal {
			break
		}
		if c.superseded {
			continue
		}
		if !b.append(c) {
			return
		}
		at.cursor = c.seq
	}
	at.cursor = at.goal
}

// The fields of Changes and Item.
const (
	fieldSet     protowire.Number = 1
	fieldDeleted protowire.Number = 2
	fieldWhole   protowire.Number = 3

	fieldPath  protowire.Number = 1
	fieldValue protowire.Number = 2

	wholeSize = 3 // bytes of an element of Changes.whole, which is not packed
)

// append appends a change to the Changes, if there is room. A single change always has room.
func (b *batch) append(c *change) bool {
	before := len(b.changes)
	if c.value == nil {
		b.changes = protowire.AppendTag(b.changes, fieldDeleted, protowire.BytesType)
		b.changes = protowire.AppendString(b.changes, c.path)
	} else {
		size := protowire.SizeTag(fieldPath) + protowire.SizeBytes(len(c.path)) +
			protowire.SizeTag(fieldValue) + protowire.SizeBytes(len(c.value))
		b.changes = protowire.AppendTag(b.changes, fieldSet, protowire.BytesType)
		b.changes = protowire.AppendVarint(b.changes, uint64(size))
		b.changes = protowire.AppendTag(b.changes, fieldPath, protowire.BytesType)
		b.changes = protowire.AppendString(b.changes, c.path)
		b.changes = protowire.AppendTag(b.changes, fieldValue, protowire.BytesType)
		b.changes = protowire.AppendBytes(b.changes, c.value)
	}
	if len(b.changes) > maxChanges && before > 0 {
		b.changes = b.changes[:before]
		return false
	}
	return true
}

// appendWhole appends a bucket to the field whole of Changes. The encoding is not packed, so that buckets can be
// appended one by one; parsers accept both encodings.
func appendWhole(changes []byte, bucket int) []byte {
	changes = protowire.AppendTag(changes, fieldWhole, protowire.VarintType)
	return protowire.AppendVarint(changes, uint64(bucket))
}

// finish returns the changes in the form that edges get. The first call compresses them; later calls return the same
// bytes.
func (b *batch) finish(h *Hub) (changes []byte, deflated bool) {
	b.once.Do(func() {
		if len(b.changes) < minDeflate {
			return
		}
		h.deflating.Lock() // one batch at a time, so that many edges with different buckets use only one processor
		defer h.deflating.Unlock()
		if small := h.deflater.deflate(b.changes); len(small) < len(b.changes) {
			b.changes, b.deflated = small, true
		}
	})
	return b.changes, b.deflated
}

// deflater compresses data. It keeps the large tables of the compressor for the next call.
type deflater struct {
	w   *flate.Writer
	buf bytes.Buffer
}

// deflate returns data compressed (RFC 1951).
func (d *deflater) deflate(data []byte) []byte {
	d.buf.Reset()
	if d.w == nil {
		d.w, _ = flate.NewWriter(&d.buf, flate.DefaultCompression) // fails only for a level that does not exist
	} else {
		d.w.Reset(&d.buf)
	}
	d.w.Write(data) //nolint:errcheck // a buffer takes everything
	d.w.Close()     //nolint:errcheck // a buffer takes everything
	return bytes.Clone(d.buf.Bytes())
}
