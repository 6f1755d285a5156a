package main

import (
	"context"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync/atomic"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/balancer"
	"tunnel.example/tunnel/pkg/egress"
	"tunnel.example/tunnel/pkg/https"
	"tunnel.example/tunnel/pkg/tcp"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/pkg/udp"
)

// cloudDoors are the front doors of a cloud that change while it runs. newCloud sets them once.
type cloudDoors struct {
	tcp    *tcp.FrontDoor
	udp    *udp.FrontDoor
	https  *https.FrontDoor  // nil: none
	egress *egress.FrontDoor // nil: none
	// egressNames are clientnames of [mode.cloud.egress], for the next handshakes.
	egressNames atomic.Pointer[[]string]
	// servers is the key servers of [mode.cloud.join]. The cloud tells them to edges with each new certificate.
	servers atomic.Pointer[[]string]
}

// cloudReloader reloads a cloud.
type cloudReloader struct {
	*reloader

	// Set once.
	file       string
	doors      *cloudDoors
	syncFolder func(path string) error // auth.SyncFolder; a test replaces it

	loaded *conf.Cloud // the last configuration that took effect; guarded by reloader.mu
}

// newCloudReloader returns the reloader of a cloud that runs with w.
func newCloudReloader(
	w *cloudWiring, file string, hangups <-chan os.Signal, stop context.CancelFunc,
) *cloudReloader {
	r := &cloudReloader{
		reloader: newReloader(w.daemon, w.conf.Settings(), hangups, stop), file: file, doors: &w.doors, loaded: w.conf,
		syncFolder: auth.SyncFolder,
	}
	r.trail = w.trail
	r.read, r.live = r.readFile, r.doors.live
	return r
}

// live returns which keys of a cloud's file can change while the cloud runs, if these are all changes.
//
// The lists of the https front door and of egress say who may connect to ports that other keys of the same table
// describe, such as tls and clientca. If one of these other keys changes, which needs a restart, the lists wait for the
// restart, too: new lists must not open the old ports. So a file without [mode.cloud.https] leaves the ports and
// allowfrom as they are.
func (d *cloudDoors) live(changes []conf.Change) (keys liveKeys) {
	lists := []struct {
		on     bool
		prefix string
		is     func(key string) bool
	}{{d.https != nil, cloudRoot + "https.", isHTTPSList}, {d.egress != nil, cloudRoot + "egress.", isEgressList}}
	for i, l := range lists {
		var waiting []string // lists that have changed
		var other string     // another key of the table that has changed
		for _, c := range changes {
			switch {
			case l.is(c.Key):
				waiting = append(waiting, c.Key)
			case strings.HasPrefix(c.Key, l.prefix):
				other = c.Key
			}
		}
		if l.on && other != "" && waiting != nil {
			keys.waits = append(keys.waits,
				"a restart is needed for "+strings.Join(waiting, ", ")+", because "+other+" differs, too")
		}
		lists[i].on = l.on && other == ""
	}
	keys.is = func(key string) bool {
		for _, l := range lists {
			if l.on && l.is(key) {
				return true
			}
		}
		for _, table := range []string{"tcp", "tcpallow", "tcpproxyfrom", "tcpsendproxy", "udp", "udpallow"} {
			if strings.HasPrefix(key, cloudRoot+table+".") {
				return true
			}
		}
		switch strings.TrimPrefix(key, cloudRoot) {
		case "admin.forwards", "join.servers", "limits.flows", "limits.flowsperaddress":
			return true
		}
		return false
	}
	return keys
}

const cloudRoot = "mode.cloud."

// isHTTPSList reports whether a key is one of those that https.FrontDoor.SetLists changes together.
func isHTTPSList(key string) bool {
	switch strings.TrimPrefix(key, cloudRoot) {
	case "https.allowfrom", "https.clientnames", "https.callers", "limits.connsperaddress":
		return true
	}
	return false
}

// isEgressList reports whether a key is one of those of egress that change together.
func isEgressList(key string) bool {
	switch strings.TrimPrefix(key, cloudRoot) {
	case "egress.strategies", "egress.defaultnodes", "egress.clientnames":
		return true
	}
	return false
}

// readFile reads and checks the file, with the words of `tunnel config check`.
func (r *cloudReloader) readFile() (*candidate, error) {
	c, err := conf.LoadCloud(r.file, environment())
	if err != nil {
		return nil, err
	}
	return r.candidate(c)
}

// candidate checks c as far as only its modules can.
func (r *cloudReloader) candidate(c *conf.Cloud) (*candidate, error) {
	check, told := *c, new(warnings)
	check.Inventory = ""                                        // newCloud must not read the inventory for a check
	if _, err := newCloud(&check, slog.New(told)); err != nil { // newCloud opens no listener
		return nil, err
	}
	return &candidate{
		settings: c.Settings(), warnings: slices.Concat(c.Warnings, told.texts),
		prepare: func(ctx context.Context, live func(string) bool) (tunnel.PreparedAll, error) {
			all, err := r.doors.prepare(ctx, c, live)
			return append(all, tunnel.Prepared{Commit: func() { r.loaded = c }, Abort: func() {}}), err
		},
	}, nil
}

// prepare prepares the changes of the front doors to the configuration c, of the keys that are live.
func (d *cloudDoors) prepare(
	ctx context.Context, c *conf.Cloud, live func(key string) bool,
) (tunnel.PreparedAll, error) {
	var strategies []egress.Strategy
	for _, s := range c.Egress.Strategies {
		strategies = append(strategies, egress.Strategy(s))
	}
	return prepareAll(
		func() (tunnel.Prepared, error) { return d.tcp.Prepare(ctx, tcpListeners(c)) },
		func() (tunnel.Prepared, error) { return d.udp.Prepare(ctx, udpListeners(c)) },
		atOnce(func() {
			d.udp.SetLimits(udpLimits(c.Limits))
			d.servers.Store(&c.Join.Servers)
			if live(cloudRoot + "https.allowfrom") {
				d.https.SetLists(https.Lists{
					ClientNames: c.HTTPS.ClientNames, Callers: httpsCallers(c.HTTPS), AllowFrom: c.HTTPS.AllowFrom,
					ConnsPerAddress: c.Limits.ConnsPerAddress,
				})
			}
			if live(cloudRoot + "egress.clientnames") {
				d.egressNames.Store(&c.Egress.ClientNames)
				d.egress.SetStrategies(strategies, c.Egress.DefaultNodes) //nolint:errcheck // conf has checked them
			}
		}),
	)
}

// tcpListeners returns the listeners of the TCP front door.
func tcpListeners(c *conf.Cloud) (all []tcp.Listener) {
	for _, l := range c.TCP {
		all = append(all, tcp.Listener{
			Listen: l.Listen, Node: l.Node, Among: l.Among, Target: l.Target, Allow: l.Allow,
			ProxyFrom: l.ProxyFrom, SendProxy: balancer.Version(l.SendProxy),
		})
	}
	return all
}

// udpListeners returns the listeners of the UDP front door.
func udpListeners(c *conf.Cloud) (all []udp.Listener) {
	for _, l := range c.UDP {
		all = append(all, udp.Listener(l))
	}
	return all
}

func httpsCallers(c conf.HTTPS) (all []https.Caller) {
	for _, caller := range c.Callers {
		all = append(all, https.Caller(caller))
	}
	return all
}
