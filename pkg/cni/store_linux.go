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

// aside is the name of the file that put writes and then renames. One name is enough, since writers hold the lock. If a
// process is killed, the file stays, and the next writer overwrites it.
const aside = ".new"

// store is the locked folder of reservations. The name of each file is its address. A process has the lock from
// opening the store until close. Only one goroutine uses a store.
type store struct {
	dir    string
	folder *os.File // holds the lock

	known   map[netip.Addr]*Reservation
	damaged map[netip.Addr]bool // addresses whose file holds no reservation: they are free
	unread  map[netip.Addr]bool // addresses whose file cannot be read: they may be in use
	own     map[netip.Addr]bool // addresses of this machine, as repair has found them
	newest  time.Time           // no time in known is later
	dirty   bool                // a name in the folder has changed since flush
	unsure  error               // why repair could not compare links; then no pod gets an address. nil: it could
}

// openStore makes the folder if it is missing, locks it, and reads all reservations. If another process has the lock,
// openStore waits for some milliseconds: no process keeps the lock while it changes links.
func openStore(dir string) (*store, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("making the folder of reservations: %w", err)
	}
	return openExisting(dir)
}

// openExisting is openStore, but fails if the folder is missing.
func openExisting(dir string) (*store, error) { return openLocked(dir, unix.LOCK_EX) }

// tryExisting is openExisting, but fails if another process has the lock.
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

// close flushes the changes and releases the lock. It ignores errors of the flush: changes that are not on the disk
// survive the end of the process, but not a power loss. A caller that needs them on the disk calls flush first.
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
			continue // not a file of this plugin
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

// put writes a reservation. If the process is killed meanwhile, or power is lost, the folder has either the whole old
// file or the whole new file. After flush, it has the new file.
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
		_ = os.Remove(file) // frees the space; if the file stays, the next put overwrites it
		return fmt.Errorf("recording address %s: %w", r.Address, err)
	}
	s.known[r.Address] = &r
	s.note(&r)
	delete(s.damaged, r.Address)
	s.dirty = true
	return nil
}

// WriteDurably writes a file, and waits until its content is on the disk. It does not wait for the name of the file.
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

// release frees an address and remembers it for its pod. If the disk is full, release removes the file, which needs no
// space: the address is free, but not remembered. DEL must use release: after DEL, nothing else frees the address.
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

// releaseGone releases the addresses in use for which gone returns true. If the disk is full, it releases them only in
// memory and leaves their files: the next process finds out again that these pods are gone.
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

// held returns the addresses that an attachment uses, in order.
func (s *store) held(by attachment) (addrs []netip.Addr) {
	for _, addr := range s.sorted() {
		if s.known[addr].belongsTo(by) {
			addrs = append(addrs, addr)
		}
	}
	return addrs
}

// adopt writes reservations that links prove and whose files are lost, so that no other pod gets their addresses. If it
// cannot write a file, this process still treats the address as used.
func (s *store) adopt(proven []Reservation) error {
	var errs []error
	for _, r := range proven {
		old := s.known[r.Address]
		if old != nil && !old.remembered() {
			continue
		}
		if old != nil && old.attachment() == r.attachment() {
			r = *old // old also names the pod, which the link does not
			r.Released = time.Time{}
		}
		errs = append(errs, s.put(r))
		s.known[r.Address] = &r
	}
	return errors.Join(errs...)
}

// heal releases each used address for which gone returns true. It removes files without a reservation, unless a link
// may have the address. It forgets the oldest remembered addresses beyond maxRemembered. If a part fails, heal does the
// other parts, and returns all errors.
func (s *store) heal(gone func(*Reservation) bool, now time.Time) error {
	errs := []error{s.releaseGone(gone, now)}
	if s.unsure == nil {
		for addr := range maps.Clone(s.damaged) {
			errs = append(errs, s.forget(addr))
		}
	}
	return errors.Join(append(errs, s.evict())...)
}

// evict forgets remembered addresses beyond maxRemembered: those that were released first.
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

// RemoveReservations removes all reservations. It also removes their folder, unless the folder holds other files.
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
