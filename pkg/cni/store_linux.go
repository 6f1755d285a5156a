package cni

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// maxRemembered is how many released addresses of one network and one address family stay remembered. A
// kubelet runs 110 pods by default; a /24 has 253 addresses for pods.
const maxRemembered = 256

// aside is the file that is written before its rename. There is one, since writers hold the lock. A process
// that was killed leaves it behind; the next writer overwrites it.
const aside = ".new"

// store is the folder of reservations, locked. Each file is named like its address. Its owner is the process
// that opened it, until close; no two goroutines share it.
type store struct {
	dir    string
	folder *os.File // holds the lock

	known   map[netip.Addr]*Reservation
	damaged map[netip.Addr]bool // the file holds no reservation: the address is free
	unread  map[netip.Addr]bool // the file cannot be read: the address may be in use
	newest  time.Time           // no time in known is later
	dirty   bool                // a name in the folder has changed since flush
	unsure  error               // why links were not compared; no address is given away then. Set by repair
}

// openStore locks the folder, makes it if missing, and reads all reservations. It waits while another process
// has the lock, which is milliseconds: nobody keeps the lock while it changes links.
func openStore(dir string) (*store, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("making the folder of reservations: %w", err)
	}
	return openExisting(dir)
}

// openExisting is openStore for a folder that must be there.
func openExisting(dir string) (*store, error) { return openLocked(dir, unix.LOCK_EX) }

// tryExisting is openExisting that fails while another process has the lock.
func tryExisting(dir string) (*store, error) { return openLocked(dir, unix.LOCK_EX|unix.LOCK_NB) }

func openLocked(dir string, lock int) (*store, error) {
	folder, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("opening the folder of reservations: %w", err)
	}
	s := &store{dir: dir, folder: folder}
	if err = retryEINTR(func() error { return unix.Flock(int(folder.Fd()), lock) }); err != nil {
		err = fmt.Errorf("locking %s: %w", dir, err)
	} else {
		err = s.read()
	}
	if err != nil {
		folder.Close()
		return nil, err
	}
	return s, nil
}

// close drops the lock. What is not flushed yet is not lost by a process that dies, but by a loss of power. A caller
// to which that matters calls flush first: the next repair releases again what is gone.
func (s *store) close() {
	_ = s.flush()
	s.folder.Close()
}

// flush makes all changes since the last flush durable.
func (s *store) flush() error {
	if !s.dirty {
		return nil
	}
	if err := s.folder.Sync(); err != nil {
		return fmt.Errorf("syncing %s: %w", s.dir, err)
	}
	s.dirty = false
	return nil
}

func (s *store) read() error {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return fmt.Errorf("reading the folder of reservations: %w", err)
	}
	s.known = make(map[netip.Addr]*Reservation, len(entries))
	s.damaged, s.unread = make(map[netip.Addr]bool), make(map[netip.Addr]bool)
	for _, entry := range entries {
		addr, err := netip.ParseAddr(entry.Name())
		if err != nil || addr.Zone() != "" || addr.String() != entry.Name() {
			continue // not ours
		}
		data, err := os.ReadFile(s.path(addr))
		if err != nil {
			s.unread[addr] = true
			continue
		}
		r := &Reservation{}
		if json.Unmarshal(data, r) != nil || r.Address != addr || r.ContainerID == "" {
			s.damaged[addr] = true
			continue
		}
		s.known[addr] = r
		s.note(r)
	}
	return nil
}

func (s *store) note(r *Reservation) {
	for _, t := range []time.Time{r.Reserved, r.Released} {
		if t.After(s.newest) {
			s.newest = t
		}
	}
}

// after returns now, or the moment after the newest time in the folder if the clock is behind. A node without a
// battery for its clock starts in the past, until a time server answers. Times only order the reservations.
func (s *store) after(now time.Time) time.Time {
	if now.After(s.newest) {
		return now
	}
	return s.newest.Add(time.Nanosecond)
}

func (s *store) path(addr netip.Addr) string { return filepath.Join(s.dir, addr.String()) }

// put writes a reservation. A process that is killed on the way, or a loss of power, leaves the old file or the new
// file, whole. After flush, it is the new file.
func (s *store) put(r Reservation) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	file := filepath.Join(s.dir, aside)
	err = WriteDurably(file, append(data, '\n'))
	if err == nil {
		err = os.Rename(file, s.path(r.Address))
	}
	if err != nil {
		_ = os.Remove(file) // gives back the space; a file that stays is overwritten
		return fmt.Errorf("recording address %s: %w", r.Address, err)
	}
	s.known[r.Address] = &r
	s.note(&r)
	delete(s.damaged, r.Address)
	s.dirty = true
	return nil
}

// WriteDurably writes a file, and waits until its content is on the disk. The name in the folder may not be there yet.
func WriteDurably(file string, data []byte) error {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// release frees the address and remembers it for its pod. On a full disk it forgets the pod and frees the
// address nevertheless, since removing a file needs no space. It is for DEL, after which nothing else says that the
// address is free.
func (s *store) release(addr netip.Addr, now time.Time) error {
	if s.put(s.released(addr, now)) == nil {
		return nil
	}
	return s.forget(addr)
}

func (s *store) released(addr netip.Addr, now time.Time) Reservation {
	r := *s.known[addr]
	r.Released = s.after(now)
	return r
}

// releaseGone releases the addresses in use for which gone returns true. On a full disk the addresses are free and
// remembered for this process alone: their files stay, since the next process sees again that they are gone.
func (s *store) releaseGone(gone func(*Reservation) bool, now time.Time) (err error) {
	for _, r := range s.byAge() {
		if r.remembered() || !gone(r) {
			continue
		}
		free := s.released(r.Address, now)
		if err == nil {
			err = s.put(free)
		}
		s.known[r.Address] = &free
		s.note(&free)
	}
	return err
}

// forget frees the address and remembers nothing.
func (s *store) forget(addr netip.Addr) error {
	if err := os.Remove(s.path(addr)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("freeing address %s: %w", addr, err)
	}
	delete(s.known, addr)
	delete(s.damaged, addr)
	s.dirty = true
	return nil
}

// held returns the addresses in use by an attachment, in order.
func (s *store) held(by attachment) (addrs []netip.Addr) {
	for _, addr := range s.sorted() {
		if s.known[addr].belongsTo(by) {
			addrs = append(addrs, addr)
		}
	}
	return addrs
}

// adopt records reservations that links prove and whose files are lost, so that nobody else gets the address. What
// cannot be written is in use for this process nevertheless.
func (s *store) adopt(proven []Reservation) error {
	var errs []error
	for _, r := range proven {
		old := s.known[r.Address]
		if old != nil && !old.remembered() {
			continue
		}
		if old != nil && old.attachment() == r.attachment() {
			r = *old // also names the pod
			r.Released = time.Time{}
		}
		errs = append(errs, s.put(r))
		s.known[r.Address] = &r
	}
	return errors.Join(errs...)
}

// heal releases each address in use for which gone returns true, and removes files of free addresses that hold no
// reservation, unless a link may have the address. It forgets the oldest remembered addresses beyond maxRemembered.
// It does what it can, and returns what failed.
func (s *store) heal(gone func(*Reservation) bool, now time.Time) error {
	errs := []error{s.releaseGone(gone, now)}
	if s.unsure == nil {
		for addr := range maps.Clone(s.damaged) {
			errs = append(errs, s.forget(addr))
		}
	}
	return errors.Join(append(errs, s.evict())...)
}

// evict keeps the memory bounded, least recently released first.
func (s *store) evict() error {
	type kind struct {
		network string
		v4      bool
	}
	remembered := make(map[kind][]*Reservation)
	for _, r := range s.known {
		if r.remembered() {
			k := kind{r.Network, r.Address.Is4()}
			remembered[k] = append(remembered[k], r)
		}
	}
	var errs []error
	for _, all := range remembered {
		slices.SortFunc(all, func(a, b *Reservation) int {
			if a.releasedBefore(b) {
				return -1
			}
			return 1
		})
		for _, r := range all[:max(0, len(all)-maxRemembered)] {
			errs = append(errs, s.forget(r.Address))
		}
	}
	return errors.Join(errs...)
}

// byAge returns the reservations, the earliest first.
func (s *store) byAge() []*Reservation {
	return slices.SortedFunc(maps.Values(s.known), func(a, b *Reservation) int {
		return cmp.Or(a.Reserved.Compare(b.Reserved), a.Address.Compare(b.Address))
	})
}

func (s *store) sorted() []netip.Addr {
	return slices.SortedFunc(maps.Keys(s.known), netip.Addr.Compare)
}

// inUse counts the addresses of a subnet that attachments have.
func (s *store) inUse(subnet netip.Prefix) (n int) {
	for addr, r := range s.known {
		if !r.remembered() && subnet.Contains(addr) {
			n++
		}
	}
	return n
}

// RemoveReservations removes all reservations, and their folder unless it holds other files.
func RemoveReservations(dir string) error {
	s, err := openExisting(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer s.close()
	var errs []error
	for _, addrs := range []iter.Seq[netip.Addr]{maps.Keys(maps.Clone(s.known)), maps.Keys(maps.Clone(s.damaged)),
		maps.Keys(s.unread)} {
		for addr := range addrs {
			errs = append(errs, s.forget(addr))
		}
	}
	if err := os.Remove(filepath.Join(dir, aside)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, unix.ENOTEMPTY) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func retryEINTR(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
