package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/test/rig"
)

// herdSize is how many edges a process holds: half of the descriptors that a usual hard
// limit lets it have.
const herdSize = 10_000

// herd is what a process of edges is told, in a file.
type herd struct {
	Replicas []string      // addresses to join
	CA       []byte        // who signed their certificates
	Sources  []string      // addresses to come from, in turn
	Pace     time.Duration // between two attempts to join; 0: none
	Nodes    []string
	Tokens   []string // of the nodes
}

// startHerds starts the edges.
func (s *storm) startHerds(dir string, names []string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	h := herd{CA: s.fleet.CA().CertPEM()}
	if s.rate > 0 {
		h.Pace = time.Second * time.Duration((len(names)+herdSize-1)/herdSize) / time.Duration(s.rate)
	}
	for _, r := range s.fleet.Replicas {
		h.Replicas = append(h.Replicas, r.GRPC())
	}
	for i := range s.sources {
		// Replicas talk from 127.0.0.1: see wire.
		h.Sources = append(h.Sources, fmt.Sprintf("127.0.%d.%d", 1+i/250, 1+i%250))
	}
	for from := 0; from < len(names); from += herdSize {
		h.Nodes, h.Tokens = names[from:min(from+herdSize, len(names))], nil
		for _, n := range h.Nodes {
			h.Tokens = append(h.Tokens, s.fleet.Token(n).Reveal())
		}
		text, err := json.Marshal(h)
		if err != nil {
			return err
		}
		file := filepath.Join(dir, "herd"+strconv.Itoa(from))
		if err = os.WriteFile(file, text, 0o600); err != nil {
			return err
		}
		p, err := rig.Start(new(rig.Log), self, "-herd", file)
		if err != nil {
			return err
		}
		s.herds = append(s.herds, p)
	}
	return nil
}

// ready returns how many edges have a session: each process prints it when it changes.
func (s *storm) ready() (n int) {
	for _, p := range s.herds {
		lines := strings.Split(p.Log().String(), "\n")
		if len(lines) > 1 { // the last one may not be complete
			if m, err := strconv.Atoi(lines[len(lines)-2]); err == nil {
				n += m
			}
		}
	}
	return n
}

// graze is a process of edges. It ends when it is killed.
func graze(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var h herd
	if err = json.Unmarshal(text, &h); err != nil {
		return err
	}
	conf := rig.EdgeTLS(h.CA)
	var turns <-chan time.Time
	if h.Pace > 0 {
		turns = time.Tick(h.Pace)
	}
	var clients []*stream.Client
	for i, node := range h.Nodes {
		from := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(h.Sources[i%len(h.Sources)])}}
		c, err := stream.NewClient(stream.ClientConfig{
			Address: h.Replicas[0], TLS: func() *tls.Config { return conf },
			Node: tunnel.NodeName(node), Token: auth.StaticToken(auth.Secret(h.Tokens[i])),
			Log: slog.New(slog.DiscardHandler), Software: "storm", Grace: time.Millisecond,
			Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
				if turns != nil {
					select {
					case <-turns:
					case <-ctx.Done():
						return nil, ctx.Err()
					}
				}
				return from.DialContext(ctx, network, h.Replicas[rand.IntN(len(h.Replicas))])
			},
		})
		if err != nil {
			return err
		}
		clients = append(clients, c)
		go c.Run(context.Background()) //nolint:errcheck // it runs until the process ends
	}
	for before := -1; ; time.Sleep(sample) {
		n := 0
		for _, c := range clients {
			if c.Ready() == nil {
				n++
			}
		}
		if n != before {
			fmt.Println(n)
		}
		before = n
	}
}
