package netwatch

import (
	"context"
	"errors"
	"sync"

	"github.com/vishvananda/netlink"
)

// subscribe sends an event for each change of addresses or routes that the kernel reports (rtnetlink(7)).
func subscribe(ctx context.Context, events chan<- struct{}) (opened bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var mu sync.Mutex // guards cause
	var cause error
	failed := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		cause = errors.Join(cause, err)
		cancel()
	}
	routes, addrs := make(chan netlink.RouteUpdate), make(chan netlink.AddrUpdate)
	err = netlink.RouteSubscribeWithOptions(routes, ctx.Done(), netlink.RouteSubscribeOptions{ErrorCallback: failed})
	if err != nil {
		return false, err
	}
	err = netlink.AddrSubscribeWithOptions(addrs, ctx.Done(), netlink.AddrSubscribeOptions{ErrorCallback: failed})
	if err != nil {
		cancel()
		for range routes { // until package netlink has closed routes
		}
		return false, err
	}
	for routes != nil || addrs != nil { // package netlink closes both when ctx is done
		select {
		case _, ok := <-routes:
			if !ok {
				routes = nil
			}
		case _, ok := <-addrs:
			if !ok {
				addrs = nil
			}
		}
		if ctx.Err() == nil {
			tell(events)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	return true, cause
}
