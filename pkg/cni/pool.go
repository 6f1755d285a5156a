package cni

import (
	"net/netip"
)

// gatewayOf returns the address of the bridge in a subnet.
func gatewayOf(subnet netip.Prefix) netip.Addr { return subnet.Addr().Next() }

// lastOf returns the last address of a subnet that a pod may have. In IPv4, the address behind it is the broadcast
// address.
func lastOf(subnet netip.Prefix) netip.Addr {
	bytes := subnet.Addr().AsSlice()
	for bit := subnet.Bits(); bit < subnet.Addr().BitLen(); bit++ {
		bytes[bit/8] |= 1 << (7 - bit%8)
	}
	last, _ := netip.AddrFromSlice(bytes) // bytes has the length of an address
	if last.Is4() {
		return last.Prev()
	}
	return last
}

// choose returns an address of a subnet for a pod, in this order:
//  1. the address that the pod had last;
//  2. the lowest address that is remembered for no pod;
//  3. the remembered address that was released first.
//
// known holds every reservation by address. choose leaves out addresses for which blocked returns true. It returns
// false if there is no address to choose.
func choose(
	subnet netip.Prefix, pod Pod, known map[netip.Addr]*Reservation, blocked func(netip.Addr) bool,
) (netip.Addr, bool) {
	var own, oldest *Reservation
	for addr, r := range known {
		if !r.remembered() || !usable(subnet, addr) || blocked(addr) {
			continue
		}
		if r.Pod.same(pod) && (own == nil || own.Released.Before(r.Released)) {
			own = r
		}
		if oldest == nil || r.releasedBefore(oldest) {
			oldest = r
		}
	}
	if own != nil {
		return own.Address, true
	}
	for addr := gatewayOf(subnet).Next(); usable(subnet, addr); addr = addr.Next() {
		if known[addr] == nil && !blocked(addr) {
			return addr, true
		}
	}
	if oldest != nil {
		return oldest.Address, true
	}
	return netip.Addr{}, false
}

// usable reports whether a pod may have an address of a subnet.
func usable(subnet netip.Prefix, addr netip.Addr) bool {
	return subnet.Contains(addr) && gatewayOf(subnet).Less(addr) && addr.Compare(lastOf(subnet)) <= 0
}

// releasedBefore reports whether r was released before other. Two times in one folder are never equal (store.after),
// unless somebody has copied files; then the lower address comes first.
func (r *Reservation) releasedBefore(other *Reservation) bool {
	if r.Released.Equal(other.Released) {
		return r.Address.Less(other.Address)
	}
	return r.Released.Before(other.Released)
}
