// Package demo shows the tunnel at work on one machine: `tunnel demo`.
//
//	demo.Run(ctx, demo.Flags{Once: true}, os.Stdout)
//
// The demo's own process is neither a cloud nor an edge. It makes certificates and
// configuration files in a temporary folder (files.go), runs an HTTPS and a TCP service
// (services.go), and starts its own program again as `tunnel cloud` and `tunnel edge`
// (child.go). Then it reaches the services through these two (checks.go, join.go). When Run
// returns, the processes have ended and the folder is gone.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"tunnel.example/tunnel/pkg/auth"
)

// Flags are the flags of `tunnel demo`.
type Flags struct {
	Once   bool   // run every check, and end
	Target string // host:port of the user's own to reach through the tunnel; "": none
}

// Check says what is wrong with the flags.
func (f Flags) Check() error {
	if f.Target == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(f.Target)
	if n, perr := strconv.ParseUint(port, 10, 16); err != nil || host == "" || perr != nil || n == 0 {
		return fmt.Errorf("--target is host:port, such as 10.0.0.5:22, not %q", f.Target)
	}
	return nil
}

// allow returns entries of the edge's allow-list for the target. An allow-list takes
// addresses only, so allow resolves the target's name.
func (f Flags) allow(ctx context.Context) ([]string, error) {
	if f.Target == "" {
		return nil, nil
	}
	host, port, err := net.SplitHostPort(f.Target)
	if err != nil {
		return nil, err // unreachable after Check
	}
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, fmt.Errorf("--target %s: %w", f.Target, err)
	}
	var entries []string
	for _, ip := range ips {
		entries = append(entries, net.JoinHostPort(ip.Unmap().WithZone("").String(), port))
	}
	return entries, nil
}

const (
	nodeName       = "edge1"
	cloudName      = "tunnel.cloud.io" // the name in the cloud's certificate
	startupTimeout = time.Minute       // until both processes are ready
	lifetime       = 24 * time.Hour    // of the certificate authorities
)

// demo is a running demonstration. Run sets every field before it starts a process.
type demo struct {
	flags Flags
	out   io.Writer
	dir   string   // certificates, configuration and logs; Run removes the folder
	ca    *auth.CA // signs every certificate but the nodes'

	// Ports and addresses, all on 127.0.0.1.
	grpc, log, edgeLog, https, tcp, own int    // ports of the cloud and of the edge
	page, echo                          string // host:port of the services behind the edge

	allow []string // addresses that the edge may dial beside its own
}

// Run runs the demonstration, and returns when ctx is done, or with Once after the checks.
func Run(ctx context.Context, flags Flags, out io.Writer) (err error) {
	signal.Ignore(syscall.SIGPIPE) // after `demo | head` Run still cleans up
	d := &demo{flags: flags, out: out}
	if d.dir, err = os.MkdirTemp("", "tunnel-demo-"); err != nil {
		return err
	}
	defer os.RemoveAll(d.dir)

	behind, err := d.serve()
	if err != nil {
		return err
	}
	defer behind.close()
	if d.allow, err = flags.allow(ctx); err != nil {
		return err
	}
	if err := d.configure(); err != nil {
		return err
	}

	// The processes outlive ctx: they stop after the last line of counters.
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	var children []*child
	defer func() {
		stop()
		for _, c := range children {
			<-c.ended
		}
	}()
	for _, mode := range []string{"cloud", "edge"} {
		c, err := d.startDaemon(run, mode)
		if err != nil {
			return err
		}
		children = append(children, c)
	}
	cloud, edge := children[0], children[1]
	if err := d.ready(ctx, cloud, edge); err != nil {
		return d.unlessInterrupted(ctx, err)
	}
	d.explain()
	failed := d.checkAll(ctx)
	if ctx.Err() != nil {
		return d.unlessInterrupted(ctx, ctx.Err())
	}
	if flags.Once {
		if failed > 0 {
			return fmt.Errorf("%d checks failed\n%s", failed, d.logs())
		}
		return nil
	}
	select {
	case <-cloud.ended:
	case <-edge.ended:
	case <-d.count(ctx):
		return nil
	}
	return fmt.Errorf("a process ended by itself: %w\n%s", unasked(cloud, edge), d.logs())
}

// unlessInterrupted returns err, unless ctx is done. Then Ctrl-C has ended the demo, which
// is a success, but with Once a failure: some checks have not run.
func (d *demo) unlessInterrupted(ctx context.Context, err error) error {
	switch {
	case ctx.Err() == nil:
		return err
	case d.flags.Once:
		return errors.New("interrupted before every check was run")
	}
	return nil
}

// explain prints a picture of the processes, and commands to paste.
func (d *demo) explain() {
	if d.flags.Once {
		return
	}
	fmt.Fprintf(d.out, `
  you ──▶ tunnel cloud  ◀═══ gRPC over TLS ═══  tunnel edge (node %s) ──▶ services
          127.0.0.1:%d                        dials out only

Reach the HTTPS service behind the edge, passed through by its name (SNI) …
  curl --cacert %[3]s/ca.crt --resolve %[1]s:%[4]d:127.0.0.1 https://%[1]s:%[4]d/
… or terminated by the cloud, as kube-apiserver's calls without SNI are:
  curl --cacert %[3]s/ca.crt --cert %[3]s/client.crt --key %[3]s/client.key -H 'Host: %[1]s' https://127.0.0.1:%[4]d/
Reach the TCP service behind the edge (it sends back what you type):
  nc 127.0.0.1 %[5]d
`, nodeName, d.grpc, d.dir, d.https, d.tcp)
	if d.flags.Target != "" {
		fmt.Fprintf(d.out, "Reach %s through the tunnel:\n  127.0.0.1:%d\n", d.flags.Target, d.own)
	}
	fmt.Fprintf(d.out,
		"Health and metrics: http://127.0.0.1:%d/metrics (cloud), http://127.0.0.1:%d/readyz?verbose (edge)\n\n",
		d.log, d.edgeLog)
}
