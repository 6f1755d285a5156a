package cni

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// sandbox is the network namespace of a pod.
type sandbox struct {
	path  string
	inode uint64
	ns    netns.NsHandle
}

// openSandbox opens the namespace at a path. It refuses the plugin's own namespace, since the pod would share the links
// of the node.
func openSandbox(path string) (*sandbox, error) {
	inode, err := namespaceAt(path)
	if err != nil {
		return nil, types.NewError(types.ErrInvalidNetNS, "opening the network namespace of the pod", err.Error())
	}
	own, err := namespaceAt("/proc/thread-self/ns/net")
	if err != nil {
		return nil, err
	}
	if inode == own {
		return nil, types.NewError(types.ErrInvalidNetNS, "the network namespace of the pod is the node's", path)
	}
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return nil, types.NewError(types.ErrInvalidNetNS, "opening the network namespace of the pod", err.Error())
	}
	return &sandbox{path, inode, ns}, nil
}

func (s *sandbox) close() { _ = s.ns.Close() }

// do runs f in the namespace: calls of netlink, and writes to /proc/sys/net, change the pod and not the node.
func (s *sandbox) do(f func() error) error {
	return onThread(func() error {
		if err := netns.Set(s.ns); err != nil {
			return fmt.Errorf("entering %s: %w", s.path, err)
		}
		return f()
	})
}

// onThread runs f on a thread that ends after f, so that f may change the namespace of the thread. f never runs on the
// main thread, which does not end.
func onThread(f func() error) error {
	done := make(chan error, 1) // capacity 1: the goroutine ends even if nobody receives
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine, unless the goroutine unlocks it
		if unix.Gettid() != os.Getpid() {
			done <- f()
			return
		}
		done <- onThread(f) // this goroutine keeps the main thread, so f gets another one
		runtime.UnlockOSThread()
	}()
	return <-done
}

// errNoNamespace says that a path leads to no namespace, since the namespace has ended.
var errNoNamespace = errors.New("no network namespace is there")

// namespaceAt returns the inode of the namespace at a path, or an error that is errNoNamespace.
func namespaceAt(path string) (uint64, error) {
	var fsys unix.Statfs_t
	if err := retryEINTR(func() error { return unix.Statfs(path, &fsys) }); err != nil {
		return 0, noNamespace(path, err)
	}
	// A runtime binds namespaces to files (nsfs). When a namespace has ended, its file stays as an empty file.
	if magic := int64(fsys.Type); magic != unix.NSFS_MAGIC && magic != unix.PROC_SUPER_MAGIC {
		return 0, fmt.Errorf("%s: %w", path, errNoNamespace)
	}
	var stat unix.Stat_t
	if err := retryEINTR(func() error { return unix.Stat(path, &stat) }); err != nil {
		return 0, noNamespace(path, err)
	}
	return stat.Ino, nil
}

func noNamespace(path string, err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return fmt.Errorf("%s: %w", path, errNoNamespace)
	}
	return fmt.Errorf("%s: %w", path, err)
}

// bootID names the current boot of the machine.
func bootID() string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "" // boots then look alike, and only the namespaces show which pods are gone
	}
	return strings.TrimSpace(string(id))
}

// goneAt returns a function that reports whether the pod of a reservation is gone: both its link and its namespace have
// ended. It does not ask the API server, whose state may be old, or about another node of the same name.
func goneAt(boot string) func(*Reservation) bool {
	return func(r *Reservation) bool {
		return !namespaceLives(r, boot) && !hostLinkLives(r.attachment())
	}
}

func namespaceLives(r *Reservation, boot string) bool {
	if r.NetNS == "" {
		return false // adopt has made the reservation from a link: only the link shows whether the pod lives
	}
	inode, err := namespaceAt(r.NetNS)
	if err != nil {
		return !errors.Is(err, errNoNamespace) // with any other error, the pod may still be there
	}
	// After a reboot, another process may have the same id and the same inode.
	if r.BootID != boot && strings.HasPrefix(r.NetNS, "/proc/") {
		return false
	}
	return inode == r.NetNSInode
}
