package rig

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Network is a network of its own (network_namespaces(7)). It lives as long as it is
// open, something runs in it, or a socket of it is open.
type Network struct{ namespace *os.File }

// NewNetwork makes a network in which loopback alone is there, and is up. It needs
// CAP_SYS_ADMIN.
func NewNetwork() (*Network, error) {
	n := new(Network)
	err := onThread(func() (err error) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("making a network: %w", err)
		}
		n.namespace, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := n.IP("link set lo up"); err != nil {
		n.Close()
		return nil, err
	}
	return n, nil
}

// Close forgets the network.
func (n *Network) Close() { n.namespace.Close() }

// Path returns where `ip link set … netns` finds the network.
func (n *Network) Path() string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.namespace.Fd())
}

// IP runs ip(8) in the network; nil is our own.
func (n *Network) IP(command string) error {
	return n.Do(func() error {
		out, err := exec.Command("ip", strings.Fields(command)...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("ip %s: %w: %s", command, err, out)
		}
		return nil
	})
}

// Do runs f in the network. Sockets that f makes stay in it; goroutines that it starts
// are not in it. So net.Listen, and net.Dial to an address with one IP, do what is
// meant.
func (n *Network) Do(f func() error) error {
	if n == nil {
		return f()
	}
	return onThread(func() error {
		if err := n.enter(); err != nil {
			return err
		}
		return f()
	})
}

// Dial connects to an address in the network. address holds an IP address: a name would
// be looked up in our own network.
func (n *Network) Dial(ctx context.Context, network, address string) (c net.Conn, err error) {
	err = n.Do(func() (err error) {
		c, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// Listen listens on a TCP address in the network.
func (n *Network) Listen(address string) (ln net.Listener, err error) {
	err = n.Do(func() (err error) {
		ln, err = net.Listen("tcp", address)
		return err
	})
	return ln, err
}

// enter takes the calling thread into the network, for good.
func (n *Network) enter() error {
	if n == nil {
		return nil
	}
	if err := unix.Setns(int(n.namespace.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("entering a network: %w", err)
	}
	return nil
}

// onThread runs f on a thread that is not used afterwards.
func onThread(f func() error) error {
	ended := make(chan error, 1) // one send
	go func() {
		runtime.LockOSThread() // without an unlock: the thread ends with the goroutine
		ended <- f()
	}()
	return <-ended
}
