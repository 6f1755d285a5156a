package cni

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
)

// Funcs returns the functions for the verbs of the plugin. Package skel itself answers VERSION.
func Funcs() skel.CNIFuncs {
	return skel.CNIFuncs{Add: printAdd, Del: del, Check: check, GC: collect, Status: status}
}

func printAdd(args *skel.CmdArgs) error {
	result, version, err := add(args)
	if err != nil {
		return err
	}
	return types.PrintResult(result, version)
}

// add is ADD. If it fails, it removes all links and addresses that it has added. version is the version of the
// specification in which the runtime wants the result.
func add(args *skel.CmdArgs) (_ *current.Result, version string, err error) {
	conf, err := parseConf(args.StdinData)
	if err != nil {
		return nil, "", err
	}
	if len(conf.Subnets) == 0 {
		return nil, "", types.NewError(types.ErrInvalidNetworkConfig, "this node has no addresses for pods", noSubnets)
	}
	pod, err := podOf(args.Args)
	if err != nil {
		return nil, "", err
	}
	inside, err := openSandbox(args.Netns)
	if err != nil {
		return nil, "", err
	}
	defer inside.close()
	if err = missingIn(inside, args.IfName); err != nil {
		return nil, "", err
	}
	bridge, err := EnsureBridge(conf)
	if err != nil {
		return nil, "", err
	}
	want := Reservation{
		Network: conf.Name, ContainerID: args.ContainerID, IfName: args.IfName, Pod: pod,
		NetNS: args.Netns, NetNSInode: inside.inode, BootID: bootID(), Reserved: time.Now().UTC(),
	}
	addrs, fresh, err := reserve(conf, want)
	if err != nil {
		return nil, "", err
	}
	mtu, err := conf.mtu()
	if err == nil {
		err = connect(want.attachment(), bridge, inside, mtu, addrs, conf.gateways(addrs))
	}
	if err != nil {
		return nil, "", errors.Join(err, undo(conf, want.attachment(), fresh))
	}
	return conf.result(want.attachment(), bridge, inside, mtu, addrs), conf.CNIVersion, nil
}

const noSubnets = "the key subnets is empty: the Node has no podCIDR yet, or the network configuration has no subnets"

// undo removes what a failed ADD has made.
func undo(conf *Conf, a attachment, fresh []netip.Addr) error {
	if err := disconnect(a); err != nil {
		return err // the addresses stay reserved while the links are there
	}
	s, err := openExisting(conf.DataDir)
	if err != nil {
		return err
	}
	defer s.close()
	var errs []error
	for _, addr := range fresh {
		// Since reserve, DEL may have freed the address, and another ADD may have reserved it.
		if r := s.known[addr]; r != nil && r.belongsTo(a) {
			errs = append(errs, s.release(addr, time.Now().UTC()))
		}
	}
	return errors.Join(append(errs, s.flush())...)
}

// gateways returns the gateway of each address.
func (c *Conf) gateways(addrs []netip.Addr) []netip.Addr {
	gateways := make([]netip.Addr, len(addrs))
	for i, addr := range addrs {
		subnet, _ := c.subnetOf(addr) // reserve has chosen addr from a subnet
		gateways[i] = gatewayOf(subnet)
	}
	return gateways
}

// result says what ADD has made: bridge, the node's end of the veth pair, the pod's end; addresses and routes.
func (c *Conf) result(a attachment, bridge netlink.Link, pod *sandbox, mtu int, addrs []netip.Addr) *current.Result {
	const inPod = 2 // index of the pod's link in Interfaces
	result := &current.Result{
		CNIVersion: current.ImplementedSpecVersion,
		Interfaces: []*current.Interface{
			{Name: c.Bridge, Mac: bridge.Attrs().HardwareAddr.String(), Mtu: bridge.Attrs().MTU},
			{Name: a.hostLink(), Mtu: mtu},
			{Name: a.ifName, Mac: macOf(addrs[0]).String(), Mtu: mtu, Sandbox: pod.path},
		},
		DNS: c.DNS,
	}
	if link, err := netlink.LinkByName(a.hostLink()); err == nil {
		result.Interfaces[1].Mac = link.Attrs().HardwareAddr.String()
	}
	for i, gateway := range c.gateways(addrs) {
		result.IPs = append(result.IPs, &current.IPConfig{
			Interface: current.Int(inPod), Address: *only(addrs[i]), Gateway: gateway.AsSlice(),
		})
		for _, route := range routesOf(0, gateway) {
			result.Routes = append(result.Routes, &types.Route{Dst: *route.Dst, GW: route.Gw})
		}
	}
	return result
}

// reserve reserves one address of each subnet. addrs are all addresses of the attachment. fresh are those of addrs
// that this call has reserved; an earlier ADD that was killed may have reserved the others.
func reserve(conf *Conf, want Reservation) (addrs, fresh []netip.Addr, err error) {
	s, err := openStore(conf.DataDir)
	if err != nil {
		return nil, nil, ioFailure(err)
	}
	defer s.close()
	healed := s.repair(want.BootID, want.Reserved)
	want.Reserved = s.after(want.Reserved)
	held := s.held(want.attachment())
	for _, subnet := range conf.Subnets {
		addr, ok := first(held, subnet)
		if !ok {
			if err = s.checkSure(); err != nil {
				break
			}
			if addr, ok = choose(subnet, want.Pod, s.known, s.isBlocked); !ok {
				err = s.full(subnet, healed)
				break
			}
			fresh = append(fresh, addr)
		}
		// If an earlier ADD has reserved the address, the reservation gets the namespace of this ADD.
		want.Address = addr
		if err = s.put(want); err != nil {
			err = ioFailure(err)
			break
		}
		addrs = append(addrs, addr)
	}
	if err == nil {
		if err = s.flush(); err == nil {
			return addrs, fresh, nil
		}
		err = ioFailure(err)
	}
	for _, addr := range fresh {
		if s.known[addr] != nil && s.known[addr].belongsTo(want.attachment()) {
			err = errors.Join(err, s.release(addr, want.Reserved))
		}
	}
	return nil, nil, err
}

func first(addrs []netip.Addr, subnet netip.Prefix) (netip.Addr, bool) {
	for _, addr := range addrs {
		if usable(subnet, addr) {
			return addr, true
		}
	}
	return netip.Addr{}, false
}

// isBlocked reports whether no pod may get an address: its file cannot be read, or this machine has it, such as the
// gateway of an earlier network of pods.
func (s *store) isBlocked(addr netip.Addr) bool { return s.unread[addr] || s.own[addr] }

// full returns the error for a subnet without a free address.
func (s *store) full(subnet netip.Prefix, healed error) error {
	details := fmt.Sprintf("%d addresses are in use; %s holds a file for each", s.inUse(subnet), s.dir)
	if len(s.unread) > 0 {
		details += fmt.Sprintf("; %d files cannot be read", len(s.unread))
	}
	if healed != nil {
		details += "; " + healed.Error()
	}
	return types.NewError(types.ErrTryAgainLater, fmt.Sprintf("subnet %s has no free address", subnet), details)
}

// repair makes the reservations agree with the links and namespaces of the node. It lists the links while it holds the
// lock. DEL removes a link first, and then the reservation. So a link without a reservation means that a file was lost.
func (s *store) repair(boot string, now time.Time) error {
	links, err := linked()
	own, ownErr := Dump(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if ownErr != nil {
		err = errors.Join(err, fmt.Errorf("listing this machine's addresses: %w", ownErr))
	}
	s.own = make(map[netip.Addr]bool, len(own))
	for _, one := range own {
		addr, _ := netip.AddrFromSlice(one.IP)
		s.own[addr.Unmap()] = true
	}
	return s.repairBy(links, err, boot, now)
}

// repairBy is repair for links, the result of linked. err is the error of linked.
func (s *store) repairBy(links map[attachment][]netip.Addr, err error, boot string, now time.Time) error {
	if err == nil {
		err = s.adopt(proven(links, boot, s.after(now)))
	}
	s.unsure = err
	return errors.Join(err, s.heal(goneAt(boot), now))
}

// ReleaseOtherBoots releases the addresses in a folder that were reserved in an earlier boot of this machine, and whose
// pods are gone: after a reboot, nobody calls DEL for them. It leaves reservations of this boot to the plugin, since an
// ADD may have made a reservation and no link yet. A missing folder is no error. ReleaseOtherBoots fails if another
// process has the lock: a plugin may hang with the lock, and the edge must not wait for it.
func ReleaseOtherBoots(dir string) error {
	s, err := tryExisting(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer s.close()
	boot := bootID()
	if boot == "" {
		return errors.New("the kernel does not name this boot")
	}
	gone := goneAt(boot)
	err = s.releaseGone(func(r *Reservation) bool { return r.BootID != boot && gone(r) }, time.Now().UTC())
	return errors.Join(err, s.flush())
}

// checkSure returns an error if repair could not compare links: then a pod may have an address without a reservation.
func (s *store) checkSure() error {
	if s.unsure == nil {
		return nil
	}
	return types.NewError(types.ErrTryAgainLater, "the reservations cannot be compared with the links of the pods",
		s.unsure.Error())
}

// proven returns a reservation for each address in the aliases of links. An alias proves which attachment has the
// address.
func proven(links map[attachment][]netip.Addr, boot string, now time.Time) (all []Reservation) {
	for a, addrs := range links {
		for _, addr := range addrs {
			all = append(all, Reservation{Address: addr, Network: a.network, ContainerID: a.containerID,
				IfName: a.ifName, BootID: boot, Reserved: now})
		}
	}
	return all
}

// del is DEL. It is no error if links, files or the namespace are gone already.
func del(args *skel.CmdArgs) error {
	conf, err := parseConf(args.StdinData)
	if err != nil {
		return err
	}
	return free(conf, attachment{conf.Name, args.ContainerID, args.IfName})
}

// free first removes the links of an attachment, and then releases its addresses. So an address becomes free only
// after no link has it.
func free(conf *Conf, a attachment) error {
	if err := disconnect(a); err != nil {
		return err
	}
	s, err := openExisting(conf.DataDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return ioFailure(err)
	}
	defer s.close()
	var errs []error
	for _, addr := range s.held(a) {
		errs = append(errs, s.release(addr, time.Now().UTC()))
	}
	if err := errors.Join(append(errs, s.flush())...); err != nil {
		return ioFailure(err)
	}
	return nil
}

// collect is GC. It frees every attachment of this network that is not in the runtime's list. If the runtime passes no
// list, GC frees only attachments whose pods are gone. A missing list is not an empty list.
func collect(args *skel.CmdArgs) error {
	conf, err := parseConf(args.StdinData)
	if err != nil {
		return err
	}
	list := conf.ValidAttachments
	if list == nil {
		list = conf.Attachments
	}
	valid := make(map[attachment]bool)
	for _, a := range list {
		valid[attachment{conf.Name, a.ContainerID, a.IfName}] = true
	}
	known, err := attachments(conf)
	errs := []error{err}
	for a := range known {
		if list != nil && a.network == conf.Name && !valid[a] {
			errs = append(errs, free(conf, a))
		}
	}
	return errors.Join(errs...)
}

// attachments returns every attachment that has a reservation or a link, after a repair.
func attachments(conf *Conf) (map[attachment]bool, error) {
	links, err := linked()
	if err != nil {
		return nil, err
	}
	known := make(map[attachment]bool)
	for a := range links {
		known[a] = true
	}
	s, err := openExisting(conf.DataDir)
	if errors.Is(err, fs.ErrNotExist) {
		return known, nil
	}
	if err != nil {
		return nil, ioFailure(err)
	}
	defer s.close()
	err = s.repair(bootID(), time.Now().UTC())
	for _, r := range s.known {
		if !r.remembered() {
			known[r.attachment()] = true
		}
	}
	return known, err
}

// status is STATUS: it returns an error if the next ADD could not succeed. It makes the bridge if the bridge is
// missing, since after a reboot a runtime asks for the status before it adds the first pod.
func status(args *skel.CmdArgs) error {
	conf, err := parseConf(args.StdinData)
	if err != nil {
		return err
	}
	if len(conf.Subnets) == 0 {
		return notReady("this node has no addresses for pods", errors.New(noSubnets))
	}
	if _, err = EnsureBridge(conf); err != nil {
		return notReady("the bridge of the pods is not ready", err)
	}
	s, err := openStore(conf.DataDir)
	if err != nil {
		return notReady("the reservations cannot be read", err)
	}
	defer s.close()
	healed := s.repair(bootID(), time.Now().UTC())
	if s.unsure != nil {
		return notReady("the reservations cannot be compared with the links of the pods", s.unsure)
	}
	for _, subnet := range conf.Subnets {
		if _, ok := choose(subnet, Pod{}, s.known, s.isBlocked); !ok {
			full := s.full(subnet, healed)
			if e, ok := errors.AsType[*types.Error](full); ok {
				return types.NewError(types.ErrPluginNotAvailable, e.Msg, e.Details)
			}
			return full
		}
	}
	return nil
}

func notReady(what string, err error) error {
	return types.NewError(types.ErrPluginNotAvailable, what, err.Error())
}

func ioFailure(err error) error {
	return types.NewError(types.ErrIOFailure, "the reservations of addresses cannot be read or written", err.Error())
}
