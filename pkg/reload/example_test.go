package reload_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/reload"
)

// A certificate is renewed while the process runs. New connections use the new one.
func Example() {
	dir, err := os.MkdirTemp("", "reload")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	crt, key := filepath.Join(dir, "https.crt"), filepath.Join(dir, "https.key")
	if err := issue("first", crt, key); err != nil {
		fmt.Println(err)
		return
	}

	files := reload.NewFiles(slog.New(slog.DiscardHandler))
	pair, err := files.Pair("mode.cloud.https", crt, key)
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- files.Run(ctx) }()

	name := func() string { return pair.Certificate().Leaf.Subject.CommonName }
	fmt.Println(name())
	if err := issue("second", crt, key); err != nil {
		fmt.Println(err)
		return
	}
	for name() == "first" {
		select {
		case err := <-ended:
			fmt.Println("the new certificate is not in use:", err)
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
	fmt.Println(name())

	stop()
	fmt.Println(<-ended)
	// Output:
	// first
	// second
	// <nil>
}

// issue writes a new certificate and its key.
func issue(name, crt, key string) error {
	ca, err := auth.NewCA("example", time.Hour)
	if err != nil {
		return err
	}
	certPEM, keyPEM, err := ca.Issue(auth.Leaf{CommonName: name, Server: true})
	if err != nil {
		return err
	}
	if err := os.WriteFile(crt, certPEM, 0o600); err != nil {
		return err
	}
	return os.WriteFile(key, keyPEM, 0o600)
}
