package audit_test

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"tunnel.example/tunnel/pkg/audit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// The audit of a front door goes to a file.
func Example() {
	dir, err := os.MkdirTemp("", "audit")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "audit.json")
	log := audit.New(audit.Config{Path: path, Log: slog.New(slog.DiscardHandler)})
	if err = log.Open(); err != nil {
		fmt.Println(err)
		return
	}
	sink := tunnel.Sink{Audit: log.Record}
	sink.Audit(tunnel.Event{Kind: tunnel.EventJoin, Result: tunnel.ResultOK, Node: "edge1"})
	if err = log.Close(); err != nil {
		fmt.Println(err)
		return
	}
	text, err := os.ReadFile(path)
	fmt.Println(len(text) > 0, err)
	// Output: true <nil>
}
