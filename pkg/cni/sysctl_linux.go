package cni

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
)

// sysctls holds the kernel's settings of the caller's network namespace.
const sysctls = "/proc/sys/net"

// setting is one of them: a path below sysctls, and its value.
type setting struct{ name, value string }

// apply makes settings true. It writes only where the value differs, so /proc/sys may be read-only once all
// values are right.
func apply(settings ...setting) error {
	for _, s := range settings {
		file := filepath.Join(sysctls, s.name)
		old, err := os.ReadFile(file)
		if err == nil && strings.TrimSpace(string(old)) == s.value {
			continue
		}
		if err == nil {
			err = os.WriteFile(file, []byte(s.value), 0o644)
		}
		if err != nil {
			return fmt.Errorf("setting net.%s to %s: %w", strings.ReplaceAll(s.name, "/", "."), s.value, err)
		}
	}
	return nil
}

// forwardingV4 has the node forward packets of pods. Redirects (RFC 792) would have pods of one node send to
// each other past the node, and so past the address translation of Services. The kernel sends redirects if
// either of both settings says so.
func forwardingV4(bridge string) []setting {
	return []setting{
		{"ipv4/ip_forward", "1"},
		{"ipv4/conf/all/send_redirects", "0"},
		{"ipv4/conf/" + bridge + "/send_redirects", "0"},
	}
}

// newLinksAcceptRA is accept_ra of links that appear later, such as a modem on USB. The value 2 also says that
// forwardV6 has switched forwarding on, or that the owner of the node wants advertisements nevertheless.
const newLinksAcceptRA = "ipv6/conf/default/accept_ra"

// forwardV6 is forwardingV4 for IPv6, applied. A link that forwards ignores router advertisements unless accept_ra
// is 2 (Linux, ip-sysctl). So links that use advertisements now keep using them, links that appear later use them,
// and the node keeps its default route.
func forwardV6(bridge string) error {
	const forwarding = "ipv6/conf/all/forwarding"
	settings := []setting{
		{"ipv6/conf/" + bridge + "/disable_ipv6", "0"},
		{"ipv6/conf/" + bridge + "/accept_ra", "0"},
		{"ipv6/conf/" + bridge + "/accept_dad", "0"},
	}
	if valueOf(forwarding) == "1" { // whoever switched forwarding on has decided about advertisements
		return apply(settings...)
	}
	if valueOf(newLinksAcceptRA) == "1" { // before the links are listed: no link comes in between
		settings = append(settings, setting{newLinksAcceptRA, "2"})
	}
	if err := apply(settings...); err != nil {
		return err
	}
	if err := raiseAcceptRA(func(link netlink.Link) bool { return link.Attrs().Name != bridge }); err != nil {
		return err
	}
	return apply(setting{forwarding, "1"})
}

// KeepAdvertisements has links that accept router advertisements keep accepting them, if forwardV6 has switched
// forwarding on: the tools of a distribution write accept_ra 1 when they start a link. It leaves the bridge alone,
// and virtual Ethernet pairs, which may be links of pods.
func KeepAdvertisements(bridge string) error {
	if valueOf(newLinksAcceptRA) != "2" {
		return nil
	}
	return raiseAcceptRA(func(link netlink.Link) bool {
		return link.Attrs().Name != bridge && link.Type() != "veth"
	})
}

// raiseAcceptRA sets accept_ra to 2 where it is 1, on links for which match returns true.
func raiseAcceptRA(match func(netlink.Link) bool) error {
	links, err := Dump(netlink.LinkList)
	if err != nil {
		return fmt.Errorf("listing links: %w", err)
	}
	for _, link := range links {
		acceptRA := "ipv6/conf/" + link.Attrs().Name + "/accept_ra"
		if link.Attrs().Name == "lo" || !match(link) || valueOf(acceptRA) != "1" {
			continue
		}
		if err := apply(setting{acceptRA, "2"}); err != nil && !errors.Is(err, fs.ErrNotExist) { // the link has gone
			return err
		}
	}
	return nil
}

// valueOf returns the value of a setting; "" if it cannot be read, as when its link has gone meanwhile.
func valueOf(name string) string {
	value, err := os.ReadFile(filepath.Join(sysctls, name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(value))
}
