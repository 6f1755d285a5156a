package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"text/template"
	"time"

	"github.com/spf13/cobra"

	"tunnel/pkg/auth"
)

// demoFlags are the flags of `tunnel demo`.
type demoFlags struct {
	once   bool
	target string
}

func (f demoFlags) check() error {
	if f.target == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(f.target)
	if n, perr := strconv.ParseUint(port, 10, 16); err != nil || host == "" || perr != nil || n == 0 {
		return fmt.Errorf("--target is host:port, such as 10.0.0.5:22, not %q", f.target)
	}
	return nil
}

// allow returns what the edge may dial for the target: its addresses, since a name is
// no check and so no entry.
func (f demoFlags) allow(ctx context.Context) ([]string, error) {
	if f.target == "" {
		return nil, nil
	}
	host, port, err := net.SplitHostPort(f.target)
	if err != nil {
		return nil, err // check has been there
	}
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, fmt.Errorf("--target %s: %w", f.target, err)
	}
	var entries []string
	for _, ip := range ips {
		entries = append(entries, net.JoinHostPort(ip.Unmap().WithZone("").String(), port))
	}
	return entries, nil
}

func newDemoCommand() *cobra.Command {
	var flags demoFlags
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "See the tunnel work on this machine: no Kubernetes, no root, no files left behind",
		Long: `demo makes a throwaway certificate authority and token, starts a cloud and an edge as two
processes on loopback, and reaches an HTTPS and a TCP service behind the edge through them.
It stays up, with live counters, until Ctrl-C.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := flags.check(); err != nil {
				return &exitError{exitUsage, err}
			}
			if err := runDemo(cmd.Context(), flags, cmd.OutOrStdout()); err != nil {
				return &exitError{exitRuntime, err}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&flags.once, "once", false, "run every check, print `ok NAME` for each, and exit")
	cmd.Flags().StringVar(&flags.target, "target", "", "also forward to `host:port`, something of your own")
	return cmd
}

const (
	demoNode    = "edge1"
	demoCloud   = "tunnel.cloud.io" // the name in the cloud's certificate
	demoStartup = 15 * time.Second  // for both processes to be ready

	demoLifetime = 24 * time.Hour // of the authorities
)

// demo is a running demonstration.
type demo struct {
	flags demoFlags
	out   io.Writer
	dir   string // certificates, configuration and logs; removed at the end

	// Where things listen, all on 127.0.0.1.
	GRPC, Log, EdgeLog, HTTPS, TCP, Own int    // ours
	Page, Echo                          string // the services behind the edge

	Allow []string // what the edge may dial beside itself

	ca *auth.CA
}

func runDemo(ctx context.Context, flags demoFlags, out io.Writer) (err error) {
	signal.Ignore(syscall.SIGPIPE) // `demo | head` must not end us before we have cleaned up
	d := &demo{flags: flags, out: out}
	if d.dir, err = os.MkdirTemp("", "tunnel-demo-"); err != nil {
		return err
	}
	defer os.RemoveAll(d.dir) //nolint:errcheck // it is in the temporary folder

	services, err := d.serve()
	if err != nil {
		return err
	}
	defer services.close()
	if d.Allow, err = flags.allow(ctx); err != nil {
		return err
	}
	if err := d.configure(); err != nil {
		return err
	}

	// The processes get a context of their own: they stop after the last counter line.
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 2)
	processes := 0
	defer func() {
		stop()
		for ; processes > 0; processes-- {
			<-ended //nolint:errcheck // it was asked to end
		}
	}()
	for _, mode := range []string{"cloud", "edge"} {
		if err := d.start(run, mode, ended); err != nil {
			return err
		}
		processes++
	}
	if err := d.ready(ctx, ended, &processes); err != nil {
		return d.unlessInterrupted(ctx, err)
	}
	d.explain()
	failed := d.checkAll(ctx)
	if ctx.Err() != nil {
		return d.unlessInterrupted(ctx, ctx.Err())
	}
	if flags.once {
		if failed > 0 {
			return fmt.Errorf("%d checks failed\n%s", failed, d.logs())
		}
		return nil
	}
	select {
	case err := <-ended:
		processes--
		return fmt.Errorf("a process ended by itself: %w\n%s", err, d.logs())
	case <-d.count(ctx):
		return nil
	}
}

// unlessInterrupted returns err, or what Ctrl-C means: the end of a demo that was
// looked at, but no success of one that was to check something.
func (d *demo) unlessInterrupted(ctx context.Context, err error) error {
	switch {
	case ctx.Err() == nil:
		return err
	case d.flags.once:
		return errors.New("interrupted before every check was run")
	}
	return nil
}

// configure makes the authority, the token and the two configuration files.
func (d *demo) configure() error {
	for name, pair := range map[string]auth.Leaf{
		"cloud":  {CommonName: demoCloud, DNSNames: []string{demoCloud}, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Server: true},
		"https":  {CommonName: "tunnel", DNSNames: []string{demoNode, "localhost"}, IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Server: true},
		"client": {CommonName: "kube-apiserver-kubelet-client", Client: true},
	} {
		cert, key, err := d.ca.Issue(pair)
		if err != nil {
			return err
		}
		if err := errors.Join(d.write(name+".crt", cert), d.write(name+".key", key)); err != nil {
			return err
		}
	}
	nodes, err := auth.NewCA("tunnel demo nodes", demoLifetime)
	if err != nil {
		return err
	}
	token := auth.NewToken()
	if err := errors.Join(
		d.write("ca.crt", d.ca.CertPEM()),
		d.write("nodes-ca.crt", nodes.CertPEM()),
		d.write("nodes-ca.key", nodes.KeyPEM()),
		d.write("tokens", []byte(demoNode+":"+token.Hashed()+"\n")),
		d.write("token", []byte(token.Reveal()+"\n")),
	); err != nil {
		return err
	}
	if err := freePorts(&d.GRPC, &d.Log, &d.EdgeLog, &d.HTTPS, &d.TCP, &d.Own); err != nil {
		return err
	}
	for name, text := range map[string]string{"cloud.toml": demoCloudTOML, "edge.toml": demoEdgeTOML} {
		var b bytes.Buffer
		if err := template.Must(template.New(name).Parse(text)).Execute(&b, d); err != nil {
			return err
		}
		if err := d.write(name, b.Bytes()); err != nil {
			return err
		}
	}
	return nil
}

// Target is the --target flag, for the templates.
func (d *demo) Target() string { return d.flags.target }

const demoCloudTOML = `[mode.cloud.stream.server]
grpcport = {{.GRPC}}
cert = "cloud.crt"
key = "cloud.key"
tokenfile = "tokens"
logport = {{.Log}}
[mode.cloud.stream.dns]
debug = true
[mode.cloud.join]
ca = "nodes-ca.crt"
cakey = "nodes-ca.key"
address = "127.0.0.1:{{.GRPC}}"
cloudca = "ca.crt"
[mode.cloud.tcp]
"127.0.0.1:{{.TCP}}" = "edge1/{{.Echo}}"
{{if .Target}}"127.0.0.1:{{.Own}}" = "edge1/{{.Target}}"{{end}}
[mode.cloud.https]
listen = "127.0.0.1"
cert = "https.crt"
key = "https.key"
clientca = "ca.crt"
[mode.cloud.https.addr]
"{{.HTTPS}}" = "{{.Page}}"
[mode.cloud.https.kubelet]
cert = "client.crt"
key = "client.key"
ca = "ca.crt"
`

const demoEdgeTOML = `[mode.edge]
node = "edge1"
allow = ["self:*"{{range .Allow}}, "{{.}}"{{end}}]
[mode.edge.stream.client]
servername = "127.0.0.1:{{.GRPC}}"
dns = "tunnel.cloud.io"
cert = "ca.crt"
tokenfile = "token"
logport = {{.EdgeLog}}
`

func (d *demo) path(name string) string { return filepath.Join(d.dir, name) }

func (d *demo) write(name string, data []byte) error {
	return os.WriteFile(d.path(name), data, 0o600)
}

// The demo's ports stay below those that the kernel gives to outgoing connections, from
// 32768: one of those must not take a port between our choice and its use.
const (
	firstPort = 10000
	lastPort  = 32000
)

// freePorts chooses ports that nobody listens on now, each another one.
func freePorts(ports ...*int) error {
	for _, port := range ports {
		ln, err := listenAnywhere()
		if err != nil {
			return err
		}
		defer ln.Close() // when all are chosen, or two might be the same
		*port = ln.Addr().(*net.TCPAddr).Port
	}
	return nil
}

// listenAnywhere listens on a free port of all interfaces, as the daemons do.
func listenAnywhere() (ln net.Listener, err error) {
	for range 100 {
		port := firstPort + rand.IntN(lastPort-firstPort) //nolint:gosec // no secret
		if ln, err = net.Listen("tcp", fmt.Sprintf(":%d", port)); err == nil {
			return ln, nil
		}
	}
	return nil, fmt.Errorf("looking for a free port between %d and %d: %w", firstPort, lastPort, err)
}

// start runs this program again as one end. It ends with run, or with us.
func (d *demo) start(run context.Context, mode string, ended chan<- error) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	log, err := os.Create(d.path(mode + ".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.CommandContext(run, self, mode, "-c", d.path(mode+".toml"))
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = childAttr()
	cmd.Cancel = func() error {
		if cmd.Process.Signal(syscall.SIGTERM) == nil {
			return nil
		}
		return cmd.Process.Kill() // Windows knows no SIGTERM
	}
	cmd.WaitDelay = 5 * time.Second // then it is killed
	started := make(chan error, 1)
	go func() {
		pinThread() // the child dies with the thread that started it
		err := cmd.Start()
		started <- err
		if err == nil {
			ended <- fmt.Errorf("tunnel %s: %w", mode, orEnded(cmd.Wait()))
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("starting tunnel %s: %w", mode, err)
	}
	return nil
}

func orEnded(err error) error {
	if err == nil {
		return errors.New("exited")
	}
	return err
}

// ready waits until both ends say so.
func (d *demo) ready(ctx context.Context, ended <-chan error, processes *int) error {
	ctx, cancel := context.WithTimeout(ctx, demoStartup)
	defer cancel()
	for _, port := range []int{d.Log, d.EdgeLog} {
		for {
			body, err := get(ctx, http.DefaultClient, fmt.Sprintf("http://127.0.0.1:%d/readyz", port))
			if err == nil {
				break
			}
			select {
			case err := <-ended:
				*processes--
				return fmt.Errorf("%w\n%s", err, d.logs())
			case <-ctx.Done():
				return fmt.Errorf("not ready within %s: %s\n%s", demoStartup, body, d.logs())
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	return nil
}

// logs returns what the processes had to say, for a failure.
func (d *demo) logs() string {
	var b strings.Builder
	for _, mode := range []string{"cloud", "edge"} {
		text, err := os.ReadFile(d.path(mode + ".log"))
		if err != nil {
			continue
		}
		fmt.Fprintf(&b, "--- log of tunnel %s\n%s", mode, text)
	}
	return strings.TrimRight(b.String(), "\n")
}

// explain prints what runs, and the lines to paste.
func (d *demo) explain() {
	if d.flags.once {
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
`, demoNode, d.GRPC, d.dir, d.HTTPS, d.TCP)
	if d.flags.target != "" {
		fmt.Fprintf(d.out, "Reach %s through the tunnel:\n  127.0.0.1:%d\n", d.flags.target, d.Own)
	}
	fmt.Fprintf(d.out, "Health and metrics: http://127.0.0.1:%d/metrics (cloud), http://127.0.0.1:%d/readyz?verbose (edge)\n\n", d.Log, d.EdgeLog)
}
