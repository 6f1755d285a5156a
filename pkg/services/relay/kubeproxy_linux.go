package relay

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"unsafe"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// kube-proxy has one of these on a node, by its mode: iptables, nftables or ipvs. Kubelet has other chains of iptables:
// KUBE-KUBELET-CANARY and KUBE-FIREWALL.
const (
	proxyChain = "KUBE-SERVICES"
	proxyTable = "kube-proxy"
	proxyLink  = "kube-ipvs0"
)

// refused implements kernel.
func (k *linux) refused() error {
	if !k.full {
		return nil
	}
	what, err := proxyRules()
	if err != nil {
		return fmt.Errorf("looking for rules of kube-proxy: %w", withRights(err))
	}
	if what != "" {
		return fmt.Errorf("%w (%s): "+
			"keep kube-proxy from this node and run kube-proxy --cleanup there, or write mode = \"relay\"; "+
			"the edge looks again every %s", errKubeProxy, what, interval)
	}
	return nil
}

// proxyRules returns the name of what kube-proxy has on this node; "": nothing.
func proxyRules() (what string, err error) {
	c, err := nftables.New()
	if err != nil {
		return "", err
	}
	tables, err := c.ListTables()
	if err != nil {
		return "", err
	}
	for _, table := range tables {
		if table.Name == proxyTable {
			return "the nftables table " + proxyTable, nil
		}
	}
	chains, err := c.ListChains()
	if err != nil {
		return "", err
	}
	for _, chain := range chains {
		if chain.Table.Name == "nat" && chain.Name == proxyChain {
			return "the chain " + proxyChain + " of iptables", nil
		}
	}
	for _, family := range []legacy{legacy4(), legacy6()} {
		if has, hasErr := family.hasChain(proxyChain); has || hasErr != nil {
			return "the chain " + proxyChain + " of iptables-legacy", hasErr
		}
	}
	if _, err = netlink.LinkByName(proxyLink); err == nil {
		return "the link " + proxyLink, nil
	}
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		return "", nil
	}
	return "", err
}

// legacy is the kernel's iptables without nftables, for one family.
type legacy struct {
	tables string // the file that names the tables in use
	module string // a folder that exists if the kernel has the table nat
	domain int    // the domain of the socket by which the kernel is asked
	level  int    // the level of that socket's options
}

func legacy4() legacy {
	return legacy{"/proc/net/ip_tables_names", "/sys/module/iptable_nat", unix.AF_INET, unix.IPPROTO_IP}
}

func legacy6() legacy {
	return legacy{"/proc/net/ip6_tables_names", "/sys/module/ip6table_nat", unix.AF_INET6, unix.IPPROTO_IPV6}
}

// hasChain reports whether the table nat has a chain. It does not ask the kernel for a table that is not in use: the
// kernel would create the table.
func (l legacy) hasChain(name string) (bool, error) {
	names, err := os.ReadFile(l.tables)
	switch {
	case errors.Is(err, os.ErrPermission): // only root reads it
		if _, err = os.Stat(l.module); err != nil {
			return false, nil // without the module there is no such table
		}
	case errors.Is(err, os.ErrNotExist):
		return false, nil // without the file there is no such iptables
	case err != nil:
		return false, err
	case !strings.Contains(string(names), "nat\n"):
		return false, nil
	}
	fd, err := unix.Socket(l.domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if isMissing(err) {
		return false, nil // without the family there are no such rules
	}
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	const attempts = 20
	entries, err := l.entries(fd)
	for n := 1; errors.Is(err, unix.EAGAIN) && n < attempts; n++ { // the table has changed between two questions
		entries, err = l.entries(fd)
	}
	if isMissing(err) {
		return false, nil // the kernel has no such table
	}
	if err != nil {
		return false, fmt.Errorf("reading the table nat of iptables-legacy: %w", err)
	}
	return bytes.Contains(entries, append([]byte(name), 0)), nil
}

// isMissing reports whether an error says that the kernel lacks a family or a table.
func isMissing(err error) bool {
	return slices.ContainsFunc([]error{unix.ENOENT, unix.ENOPROTOOPT, unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT},
		func(e error) bool { return errors.Is(err, e) })
}

// entries returns the rules of the table nat in the kernel's form: struct ipt_get_entries of
// linux/netfilter_ipv4/ip_tables.h. The names of chains are plain text in it.
func (l legacy) entries(fd int) ([]byte, error) {
	const (
		getInfo, getEntries = 64, 65
		nameSize            = 32
		infoSize            = nameSize + 4 + 5*4 + 5*4 + 4 + 4 // struct ipt_getinfo; the size of the entries is last
	)
	info := make([]byte, infoSize)
	copy(info, "nat")
	if err := l.get(fd, getInfo, info); err != nil {
		return nil, err
	}
	size := *(*uint32)(unsafe.Pointer(&info[infoSize-4])) //nolint:gosec // it is aligned, and in the array
	const most = 64 << 20
	if size == 0 || size > most {
		return nil, errors.New("the table has no size")
	}
	const head = nameSize + 8 // the size, and what aligns the entries
	entries := make([]byte, head+int(size))
	copy(entries, "nat")
	*(*uint32)(unsafe.Pointer(&entries[nameSize])) = size //nolint:gosec // as above
	if err := l.get(fd, getEntries, entries); err != nil {
		return nil, err
	}
	return entries[head:], nil
}

// get calls getsockopt(2).
func (l legacy) get(fd, option int, b []byte) error {
	size := uint32(len(b)) //nolint:gosec // bounded
	_, _, err := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(l.level), uintptr(option),
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&size)), 0) //nolint:gosec // as the kernel wants it
	if err != 0 {
		return err
	}
	return nil
}
