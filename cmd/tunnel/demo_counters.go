package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"crypto/tls"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel/pkg/auth"
	"tunnel/pkg/reload"
	"tunnel/pkg/stream"
)

// count prints the cloud's counters, every second on a terminal and when they change
// elsewhere, until ctx is done or nobody reads them. The channel is closed then.
func (d *demo) count(ctx context.Context) <-chan struct{} {
	done := make(chan struct{})
	terminal := isTerminal(d.out)
	_, err := fmt.Fprintln(d.out, "\nlive counters of the cloud; Ctrl-C ends the demo")
	go func() {
		defer close(done)
		var last string
		for err == nil {
			if line := d.counters(ctx); line != "" && (terminal || line != last) {
				last = line
				if terminal {
					_, err = fmt.Fprintf(d.out, "\r\x1b[K%s", line)
				} else {
					_, err = fmt.Fprintln(d.out, line)
				}
			}
			select {
			case <-ctx.Done():
				fmt.Fprintln(d.out, "\nstopping; nothing is left behind")
				return
			case <-time.After(time.Second):
			}
		}
	}()
	return done
}

func isTerminal(w any) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// counters is one line of what the cloud's /metrics says, "" when it says nothing.
func (d *demo) counters(ctx context.Context) string {
	text, err := get(ctx, http.DefaultClient, fmt.Sprintf("http://127.0.0.1:%d/metrics", d.Log))
	if err != nil {
		return ""
	}
	values := make(map[string]float64)
	for line := range strings.SplitSeq(text, "\n") {
		name, value, ok := strings.Cut(line, " ")
		if !ok || strings.HasPrefix(line, "#") {
			continue
		}
		name, _, _ = strings.Cut(name, "{") // the refusals of all codes together
		if v, err := strconv.ParseFloat(value, 64); err == nil {
			values[name] += v
		}
	}
	return fmt.Sprintf("nodes %.0f   conns %.0f now, %.0f opened, %.0f refused   %s to the edge, %s from it",
		values["tunnel_sessions"], values["tunnel_conns"], values["tunnel_conns_opened_total"],
		values["tunnel_conns_refused_total"], size(values["tunnel_sent_bytes_total"]), size(values["tunnel_received_bytes_total"]))
}

// size returns a number of bytes as people write it.
func size(n float64) string {
	for _, unit := range []string{"B", "kB", "MB", "GB"} {
		if n < 1000 {
			return strconv.FormatFloat(n, 'g', 3, 64) + " " + unit
		}
		n /= 1000
	}
	return strconv.FormatFloat(n, 'g', 3, 64) + " TB"
}

// joinWithWrongToken tries to join as the demo's node with a token of its own, once.
func (d *demo) joinWithWrongToken(ctx context.Context) error {
	ca, err := reload.NewPool(d.path("ca.crt"), slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	conf := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: ca.Pool(), ServerName: demoCloud}
	client, err := stream.NewClient(stream.ClientConfig{
		Address: fmt.Sprintf("127.0.0.1:%d", d.GRPC),
		TLS:     func() *tls.Config { return conf },
		Node:    demoNode,
		Token:   func() (auth.Secret, error) { return auth.NewToken(), nil },
		Log:     slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		client.Run(ctx) //nolint:errcheck // Ready tells
	}()
	defer func() {
		cancel()
		<-ended
	}()
	for {
		err := client.Ready()
		if err == nil || isUnauthenticated(err) || ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
		select {
		case <-ctx.Done():
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func isUnauthenticated(err error) bool { return status.Code(err) == codes.Unauthenticated }
