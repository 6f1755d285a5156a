package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/utils"
)

// Conf is the network configuration that the runtime hands to the plugin.
type Conf struct {
	types.PluginConf
	Bridge  string         `json:"bridge"`  // name of the bridge; default DefaultBridge
	MTU     int            `json:"mtu"`     // bytes; 0: the MTU of the link with the default route
	Subnets []netip.Prefix `json:"subnets"` // of the node's pods: at most one per address family
	DataDir string         `json:"datadir"` // folder of the reservations; default DefaultDataDir

	// Attachments is ValidAttachments of PluginConf under an earlier name of the specification.
	Attachments []types.GCAttachment `json:"cni.dev/attachments"`
}

// The smallest MTU of IPv4 (RFC 791, section 3.2) and IPv6 (RFC 8200, section 5), and the largest of Linux.
const (
	minMTU   = 68
	minMTUv6 = 1280
	maxMTU   = 65535
)

// parseConf reads a network configuration and fills in the defaults. It refuses malformed values. It accepts a
// configuration without subnets, since only ADD and STATUS need them.
func parseConf(data []byte) (*Conf, error) {
	conf := &Conf{}
	if err := json.Unmarshal(data, conf); err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "reading the network configuration", err.Error())
	}
	if conf.Bridge == "" {
		conf.Bridge = DefaultBridge
	}
	if conf.DataDir == "" {
		conf.DataDir = DefaultDataDir
	}
	if err := conf.validate(); err != nil {
		return nil, types.NewError(types.ErrInvalidNetworkConfig, "network "+conf.Name+" is misconfigured", err.Error())
	}
	return conf, nil
}

func (c *Conf) validate() error {
	var errs []error
	if err := utils.ValidateInterfaceName(c.Bridge); err != nil {
		errs = append(errs, fmt.Errorf("bridge %q: %s", c.Bridge, err.Msg))
	}
	if !filepath.IsAbs(c.DataDir) {
		errs = append(errs, fmt.Errorf("datadir %q: the path must be absolute", c.DataDir))
	}
	if c.MTU != 0 && (c.MTU < minMTU || c.MTU > maxMTU) {
		errs = append(errs, fmt.Errorf("mtu %d: from %d to %d, or 0 for the uplink's", c.MTU, minMTU, maxMTU))
	}
	var v4, v6 int
	for _, subnet := range c.Subnets {
		errs = append(errs, validateSubnet(subnet))
		if subnet.Addr().Is4() {
			v4++
		} else {
			v6++
		}
	}
	if v4 > 1 || v6 > 1 {
		errs = append(errs, errors.New("subnets: at most one of IPv4 and one of IPv6"))
	}
	if v6 > 0 && c.MTU != 0 && c.MTU < minMTUv6 {
		errs = append(errs, fmt.Errorf("mtu %d: IPv6 needs %d or more", c.MTU, minMTUv6))
	}
	return errors.Join(errs...)
}

func validateSubnet(subnet netip.Prefix) error {
	switch addr := subnet.Addr(); {
	case !subnet.IsValid():
		return errors.New("subnets: an entry is empty")
	case addr.Is4In6():
		return fmt.Errorf("subnet %s: write it as IPv4", subnet)
	case subnet != subnet.Masked():
		return fmt.Errorf("subnet %s: did you mean %s?", subnet, subnet.Masked())
	case addr.IsMulticast() || addr.IsLoopback() || addr.IsUnspecified() || addr.IsLinkLocalUnicast():
		return fmt.Errorf("subnet %s: pods cannot have such addresses", subnet)
	case subnet.Bits() > addr.BitLen()-2:
		return fmt.Errorf("subnet %s: no room for a gateway and a pod", subnet)
	}
	return nil
}

// subnetOf returns the subnet that holds addr.
func (c *Conf) subnetOf(addr netip.Addr) (netip.Prefix, bool) {
	for _, subnet := range c.Subnets {
		if subnet.Contains(addr) {
			return subnet, true
		}
	}
	return netip.Prefix{}, false
}
