package rig

import (
	"cmp"
	"container/heap"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Quality is what a link does to packets, in each direction by itself.
type Quality struct {
	Delay  time.Duration // one way
	Jitter time.Duration // up to so much more or less; packets overtake each other
	Loss   float64       // part of the packets, 0 to 1
	Rate   int           // bytes a second; 0: no limit
	Cut    bool          // nothing passes, and nobody is told
	// Largest is the size of the largest packet that passes, in bytes: larger ones are lost, and nobody is told.
	// 0: no limit.
	Largest int
	// Buffer is how long a packet may wait for those before it at the link's rate: a router whose
	// buffer is full drops it. 0: maxWait.
	Buffer time.Duration
}

const (
	// maxQueued is how many packets of one direction may be under way, and wait for us to read
	// them: memory has an end. A device's usual 500 lose part of every burst over a long link.
	maxQueued = 1 << 15
	// maxWait is Quality.Buffer by default.
	maxWait = 100 * time.Millisecond
)

// Link joins two networks by a pair of TUN devices, whose packets this process carries:
// netem(8) for kernels that have none.
type Link struct {
	ends    [2]*os.File
	carried sync.WaitGroup

	mu      sync.Mutex // guards the following
	quality Quality
}

// NewLink joins two networks. Each gets a device "link" with its address and the same
// prefix, such as 10.1.0.1/24 and 10.1.0.2/24, and that MTU.
func NewLink(networks [2]*Network, addresses [2]netip.Prefix, mtu int, q Quality) (*Link, error) {
	return NewLinkAs("link", networks, addresses, mtu, q)
}

// NewLinkAs is NewLink with devices of another name, for networks that are joined by several links.
func NewLinkAs(device string, networks [2]*Network, addresses [2]netip.Prefix, mtu int, q Quality) (*Link, error) {
	l := &Link{quality: q}
	for i, n := range networks {
		var err error
		if l.ends[i], err = newTUN(n, device); err == nil {
			err = errors.Join(
				n.IP(fmt.Sprintf("addr add %s dev %s", addresses[i], device)),
				n.IP(fmt.Sprintf("link set dev %s up mtu %d txqueuelen %d", device, mtu, maxQueued)))
		}
		if err != nil {
			l.Close()
			return nil, err
		}
	}
	for i := range l.ends {
		d := &direction{link: l, from: l.ends[i], to: l.ends[1-i], arrived: make(chan packet, 1),
			rng: rand.New(rand.NewPCG(1, uint64(i)))}
		l.carried.Go(d.read)
		l.carried.Go(d.deliver)
	}
	return l, nil
}

// newTUN makes a TUN device in a network. Packets come without a header.
func newTUN(n *Network, name string) (file *os.File, err error) {
	err = n.Do(func() error {
		var fd int
		if fd, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0); err != nil {
			return fmt.Errorf("opening /dev/net/tun: %w", err)
		}
		var request *unix.Ifreq
		if request, err = unix.NewIfreq(name); err == nil {
			request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
			err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
		}
		if err != nil {
			unix.Close(fd)
			return fmt.Errorf("making the device %s: %w", name, err)
		}
		file = os.NewFile(uintptr(fd), "/dev/net/tun")
		return nil
	})
	return file, err
}

// Set changes what the link does to packets that come from now on.
func (l *Link) Set(q Quality) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.quality = q
}

func (l *Link) now() Quality {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.quality
}

// Close removes both devices.
func (l *Link) Close() {
	for _, f := range l.ends {
		if f != nil {
			f.Close()
		}
	}
	l.carried.Wait()
}

// packet is one that is under way.
type packet struct {
	data []byte
	due  time.Time
	seq  int // of two that are due at the same time the first goes first
}

// direction carries packets one way.
type direction struct {
	link     *Link
	from, to *os.File
	arrived  chan packet // from read to deliver; closed by read

	// Owned by read.
	rng  *rand.Rand
	free time.Time // when the last packet has left, at the link's rate
	seq  int
}

// read takes packets until the device is gone.
func (d *direction) read() {
	defer close(d.arrived)
	buf := make([]byte, 64<<10)
	for {
		n, err := d.from.Read(buf)
		if err != nil {
			return
		}
		q := d.link.now()
		if q.Cut || d.rng.Float64() < q.Loss || q.Largest > 0 && n > q.Largest {
			continue
		}
		left := time.Now()
		if q.Rate > 0 {
			if d.free.After(left) {
				if d.free.Sub(left) > cmp.Or(q.Buffer, maxWait) {
					continue
				}
				left = d.free
			}
			left = left.Add(time.Duration(n) * time.Second / time.Duration(q.Rate))
			d.free = left
		}
		late := q.Delay
		if q.Jitter > 0 {
			late += time.Duration(d.rng.Int64N(int64(2*q.Jitter))) - q.Jitter
		}
		d.seq++
		d.arrived <- packet{append([]byte(nil), buf[:n]...), left.Add(late), d.seq}
	}
}

// deliver writes packets when they are due, until read has ended.
func (d *direction) deliver() {
	var waiting queue
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		if len(waiting) > 0 {
			timer.Reset(time.Until(waiting[0].due))
		}
		select {
		case p, ok := <-d.arrived:
			if !ok {
				return
			}
			if len(waiting) < maxQueued {
				heap.Push(&waiting, p)
			}
		case <-timer.C:
		}
		for len(waiting) > 0 && !waiting[0].due.After(time.Now()) {
			p := heap.Pop(&waiting).(packet)
			d.to.Write(p.data) //nolint:errcheck // a device that is down or gone loses packets
		}
	}
}

// queue is a heap of packets, the next to be due first.
type queue []packet

func (q queue) Len() int      { return len(q) }
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q queue) Less(i, j int) bool {
	if q[i].due.Equal(q[j].due) {
		return q[i].seq < q[j].seq
	}
	return q[i].due.Before(q[j].due)
}

// Push implements heap.Interface.
func (q *queue) Push(p any) { *q = append(*q, p.(packet)) }

// Pop implements heap.Interface.
func (q *queue) Pop() any {
	last := len(*q) - 1
	p := (*q)[last]
	*q = (*q)[:last]
	return p
}
