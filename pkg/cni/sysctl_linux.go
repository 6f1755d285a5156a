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

// setting is one setting of the kernel: its path below sysctls, and the value that it must have.
type setting struct{ name, value string }

// apply gives the settings their values. It writes only values that differ, so /proc/sys may be read-only if all values
// are right.
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

// forwardingV4 returns the settings by which the node forwards packets of pods, and sends no redirects (RFC 792). With
// redirects, pods would send to each other directly, past the node's address translation for Services. The kernel sends
// redirects if one of its two settings is on.
func forwardingV4(bridge string) []setting {
	return []setting{
		{"ipv4/ip_forward", "1"},
		{"ipv4/conf/all/send_redirects", "0"},
		{"ipv4/conf/" + bridge + "/send_redirects", "0"},
	}
}

// ignoreAdvertisements has a link ignore router advertisements (RFC 4861), with which a pod could make itself the
// IPv6 router of the node or of other pods (CVE-2020-10749). A kernel without IPv6 does not have the setting.
func ignoreAdvertisements(link string) error {
	if err := apply(setting{"ipv6/conf/" + link + "/accept_ra", "0"}); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// newLinksAcceptRA is accept_ra for links that appear later, such as a USB modem. Its value 2 also tells later runs
// that forwardV6 has switched forwarding on, or that the owner of the node wants router advertisements in any case.
const newLinksAcceptRA = "ipv6/conf/default/accept_ra"

// forwardV6 switches on forwarding for IPv6. A link that forwards ignores router advertisements unless its accept_ra is
// 2 (Linux, ip-sysctl). So forwardV6 sets accept_ra to 2 for links that use advertisements now, and for links that
// appear later. Otherwise the node would lose its default route.
func forwardV6(bridge string) error {
	const forwarding = "ipv6/conf/all/forwarding"
	settings := []setting{
		{"ipv6/conf/" + bridge + "/disable_ipv6", "0"},
		{"ipv6/conf/" + bridge + "/accept_dad", "0"},
	}
	if valueOf(forwarding) == "1" { // forwarding is on already: leave accept_ra as its owner has set it
		return apply(settings...)
	}
	if valueOf(newLinksAcceptRA) == "1" { // set it before listing the links, so that no link is missed in between
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

// KeepAdvertisements sets accept_ra to 2 again on links where it is 1, if forwardV6 has switched forwarding on. The
// tools of a distribution write 1 when they start a link. It leaves out the bridge, and veth pairs, which may be links
// of pods.
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
		if err := apply(setting{acceptRA, "2"}); err != nil && !errors.Is(err, fs.ErrNotExist) { // else the link has gone
			return err
		}
	}
	return nil
}

// valueOf returns the value of a setting. It returns "" if it cannot read the setting, for instance because the link
// has gone.
func valueOf(name string) string {
	value, err := os.ReadFile(filepath.Join(sysctls, name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(value))
}
