package auth_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"tunnel.example/tunnel/pkg/auth"
)

// A cloud accepts the token of edge1, and nothing else.
func ExampleGate() {
	dir, err := os.MkdirTemp("", "auth")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	const secret = auth.Secret("correct-horse-battery-staple")
	content, err := auth.AddToken("", auth.TokenLine{Node: "edge1", Secret: secret}, time.Now())
	if err != nil {
		fmt.Println(err)
		return
	}
	path := filepath.Join(dir, "tokens")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		fmt.Println(err)
		return
	}

	log := slog.New(slog.DiscardHandler)
	tokens, err := auth.NewTokens(auth.TokensConfig{Path: path, Log: log})
	if err != nil {
		fmt.Println(err)
		return
	}
	gate := auth.NewGate(auth.GateConfig{Tokens: tokens, Log: log})
	session, end := context.WithCancel(context.Background())
	defer end()
	grant, err := gate.Authenticate(session, auth.Credential{Node: "edge1", Token: secret})
	fmt.Println(grant.Node, grant.By, err)
	_, err = gate.Authenticate(session, auth.Credential{Node: "edge2", Token: secret})
	fmt.Println(errors.Is(err, auth.ErrUnauthenticated))
	// Output:
	// edge1 token <nil>
	// true
}

// An edge may dial its kubelet, and port 443 of one network.
func ExamplePolicy() {
	policy, err := auth.ParsePolicy([]string{"self:10250", "10.0.0.0/8:443"})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, to := range []string{"127.0.0.1:10250", "127.0.0.1:22", "10.1.2.3:443", "192.168.0.1:443"} {
		fmt.Println(to, policy.Permits(netip.MustParseAddrPort(to)))
	}
	// Output:
	// 127.0.0.1:10250 true
	// 127.0.0.1:22 false
	// 10.1.2.3:443 true
	// 192.168.0.1:443 false
}

// A secret never appears in a log or an error.
func ExampleSecret() {
	token := auth.Secret("correct-horse")
	fmt.Printf("%s %v %q\n", token, token, token)
	fmt.Println(token.Reveal())
	// Output:
	// *** *** ***
	// correct-horse
}
