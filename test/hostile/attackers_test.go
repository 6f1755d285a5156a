package hostile

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/test/rig"
)

// Attackers are a process of their own, this program again. Where it is weighed what
// others notice they are the last to get a processor: on a machine of their own they
// would take none at all of those that the cloud has.

// attacking is set in the environment of the attackers' process.
const attacking = "TUNNEL_ATTACKING"

// order is what the attackers' process is told to do.
type order struct {
	Test, Attack string // which attack
	Victim       *victim
}

// victim is what attackers know of a cloud, and have of its credentials.
type victim struct {
	Addr  map[string]string // "grpc", "https", "health", and the TCP front doors: "echo", and one to each evil node
	Token map[string]string // of the evil nodes
	Dir   string            // where ca.crt is, and client.crt, with which a kube-apiserver calls
}

func (l *lab) victim() *victim {
	v := &victim{
		Addr:  map[string]string{"grpc": l.GRPC(), "https": l.HTTPSDoor(), "health": l.CloudHealth(), "echo": l.Door("echo")},
		Token: make(map[string]string), Dir: l.Path(""),
	}
	for _, evil := range evils {
		v.Addr[evil], v.Token[evil] = l.Door(evil), l.Token(evil).Reveal()
	}
	return v
}

func (v *victim) token(node string) auth.Secret { return auth.Secret(v.Token[node]) }

// edgeTLS is how an edge connects.
func (v *victim) edgeTLS() *tls.Config {
	cfg := rig.EdgeTLS(v.file("ca.crt"))
	cfg.NextProtos = []string{"h2"}
	return cfg
}

// callerTLS is how a caller of the HTTPS front door connects to have its requests routed
// by name, with the certificate of a kube-apiserver or without.
func (v *victim) callerTLS(certificate bool) *tls.Config {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(v.file("ca.crt"))
	// an address is never sent as SNI
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool, ServerName: "127.0.0.1"}
	if certificate {
		pair, err := tls.X509KeyPair(v.file("client.crt"), v.file("client.key"))
		if err != nil {
			panic(err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return cfg
}

func (v *victim) file(name string) []byte {
	content, err := os.ReadFile(filepath.Join(v.Dir, name))
	if err != nil {
		panic(err)
	}
	return content
}

// start starts the attackers, each of which offends again and again, and returns when they
// do. The function that it returns ends them.
func (a attack) start(l *lab, answers *answers) (stop func(), err error) {
	cmd := exec.Command("chrt", "--idle", "0", os.Args[0]) // of util-linux, which every Linux has
	if !long() {                                           // it runs beside other tests, which would leave it nothing
		cmd = exec.Command(os.Args[0])
	}
	cmd.Env = append(os.Environ(), attacking+"=1")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for us; it ends with its stdin
	orders, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	stop = func() {
		orders.Close()
		cmd.Wait()
	}
	if err := json.NewEncoder(orders).Encode(order{l.t.Name(), a.name, l.victim()}); err != nil {
		stop()
		return nil, err
	}
	said := bufio.NewScanner(out)
	if !said.Scan() {
		stop()
		return nil, fmt.Errorf("the attackers do not start: %w", io.ErrUnexpectedEOF)
	}
	heard := make(chan struct{})
	go func() {
		defer close(heard)
		for said.Scan() {
			answers.add(said.Text())
		}
	}()
	return func() {
		orders.Close()
		<-heard
		cmd.Wait()
	}, nil
}

// attackFor does what it is ordered to until there is no more to read. It prints a line
// when it begins and one with each answer.
func attackFor(orders io.Reader, out io.Writer) error {
	in := json.NewDecoder(orders)
	var o order
	if err := in.Decode(&o); err != nil {
		return err
	}
	attacks := map[string]func() []attack{"TestHostileCaller": callerAttacks, "TestHostileEdge": edgeAttacks,
		"TestHostileHTTP2": http2Attacks}
	list := attacks[o.Test]()
	i := slices.IndexFunc(list, func(a attack) bool { return a.name == o.Attack })
	if i < 0 {
		return fmt.Errorf("no attack is called %q", o.Attack)
	}
	a := list[i]
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var mu sync.Mutex // guards out
	say := func(line string) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintln(out, line)
	}
	say("attacking")
	var all sync.WaitGroup
	for _, as := range evils {
		all.Go(func() { a.repeat(ctx, o.Victim, as, say) })
		if a.alone {
			break
		}
	}
	io.Copy(io.Discard, orders) // until it ends
	cancel()
	all.Wait()
	return nil
}

// repeat is one attacker.
func (a attack) repeat(ctx context.Context, v *victim, as string, say func(string)) {
	for ctx.Err() == nil {
		answer := a.offend(ctx, v, as)
		switch {
		case answer == tooOften:
		case ctx.Err() == nil:
			say(answer)
		case slices.Contains(a.answers, "endured"): // else it was cut short by us
			say("endured")
		}
		select {
		case <-time.After(comesBack):
		case <-ctx.Done():
		}
	}
}

// attackers is where attacks come from. It is another source than that of the calm, as
// it would be, and so their places are counted apart.
var attackers = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 66)}

// attackerDial connects as an attacker. The connection ends with ctx.
func attackerDial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := (&net.Dialer{LocalAddr: attackers, Timeout: hangs}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	c.(*net.TCPConn).SetLinger(0)
	context.AfterFunc(ctx, func() { c.Close() })
	return c, nil
}

// pace calls f perSecond times a second until it fails or ctx is done. On a busy machine it catches up what it has
// missed in the last second: a slower flood would be no offence.
func pace(ctx context.Context, perSecond int, f func() error) error {
	const ticks = 100
	tick := time.NewTicker(time.Second / ticks)
	defer tick.Stop()
	last, due := time.Now(), float64(max(1, perSecond/ticks))
	for {
		for ; due >= 1; due-- {
			if err := f(); err != nil {
				return err
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		now := time.Now()
		due = min(due+now.Sub(last).Seconds()*float64(perSecond), float64(perSecond))
		last = now
	}
}
