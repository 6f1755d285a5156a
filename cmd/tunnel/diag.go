package main

import (
	"archive/zip"
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/tunnel"
)

func newDiagCommand() *cobra.Command {
	var ask askFlags
	var file string
	cmd := &cobra.Command{
		Use:   "diag [-f FILE]",
		Short: "Collect the state of a running cloud or edge in a zip file",
		Long: `diag writes a zip file for a person who looks for a fault. It holds versions, the configuration without
secrets, the checks of /readyz, metrics, goroutines and a heap profile. It also holds what "tunnel status" and
"tunnel ls" show, and settings of the kernel. It has no token, no private key and no payload. It has names of nodes, and
addresses.

It has no log, since cloud and edge keep none. To add it:

  tunnel diag
  journalctl -u tunnel-cloud --since -1h > tunnel-cloud.log

Exit codes: 0 the file is written, and a warning names what is missing in it; 1 the file cannot be written; 3 the
configuration names no admin socket.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var missing []string
			var err error
			name := cmp.Or(file, diagName())
			if name == toStdout {
				missing, err = collectDiag(cmd.Context(), cmd.OutOrStdout(), &ask)
			} else {
				missing, err = writeDiag(cmd.Context(), name, &ask)
			}
			if err != nil {
				return err
			}
			for _, text := range missing {
				fmt.Fprintln(cmd.ErrOrStderr(), "warning: "+tunnel.Printable(text))
			}
			if name != toStdout {
				_, err = fmt.Fprintln(cmd.OutOrStdout(), name)
			}
			return err
		},
	}
	ask.register(cmd, cloudFile, edgeFile)
	cmd.Flags().StringVarP(&file, "file", "f", "",
		"zip `FILE` to write, or - for standard output; without -f: tunnel-diag-TIME.zip in this folder")
	return cmd
}

// toStdout is the file name that stands for standard output.
const toStdout = "-"

// diagName returns the name of a new file.
func diagName() string { return "tunnel-diag-" + time.Now().Format("20060102-150405") + ".zip" }

// newDiagFile creates a file, which must not exist.
func newDiagFile(name string) (*os.File, error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, &exitError{exitRuntime, err}
	}
	return f, nil
}

// writeDiag writes a new file. missing says what it could not collect.
func writeDiag(ctx context.Context, name string, ask *askFlags) (missing []string, err error) {
	if _, err = ask.sockets(); err != nil {
		return nil, err
	}
	f, err := newDiagFile(name)
	if err != nil {
		return nil, err
	}
	missing, err = collectDiag(ctx, f, ask)
	if closed := f.Close(); err == nil && closed != nil {
		err = &exitError{exitRuntime, closed}
	}
	if err != nil {
		os.Remove(name) //nolint:errcheck // the first error says more
		return nil, err
	}
	return missing, nil
}

// collectDiag writes the zip file to w. missing says what it could not collect.
func collectDiag(ctx context.Context, w io.Writer, ask *askFlags) (missing []string, err error) {
	sockets, err := ask.sockets()
	if err != nil {
		return nil, err
	}
	d := &diag{zip: zip.NewWriter(w)}
	d.add("version.txt", []byte(versionText()), nil)
	d.add("kernel.txt", kernelFacts(), nil)
	for _, s := range sockets {
		d.addDaemon(ctx, cmp.Or(s.mode, "daemon"), s.path)
	}
	files, err := ask.config.files()
	if err != nil { // with --socket, the archive needs no configuration files
		files = nil
	}
	for _, path := range files {
		text, err := withoutSecretValues(path)
		d.add(filepath.Base(path)+".txt", text, err)
	}
	d.add("missing.txt", []byte(strings.Join(d.missing, "\n")), nil)
	d.failed = cmp.Or(d.failed, d.zip.Close())
	if d.failed != nil {
		return nil, &exitError{exitRuntime, d.failed}
	}
	return d.missing, nil
}

// diag writes the zip file.
type diag struct {
	zip     *zip.Writer
	missing []string // what could not be collected
	failed  error    // the first error of the zip file
}

// add adds a file, unless it could not be collected.
func (d *diag) add(name string, text []byte, err error) {
	if err != nil {
		d.missing = append(d.missing, fmt.Sprintf("no %s: %v", name, err))
		return
	}
	w, err := d.zip.CreateHeader(&zip.FileHeader{Name: name, Method: zip.Deflate, Modified: time.Now()})
	if err == nil {
		_, err = w.Write(text)
	}
	d.failed = cmp.Or(d.failed, err)
}

// diagTime is how long each request to a daemon may take.
const diagTime = 20 * time.Second

// addDaemon adds what a daemon says about itself.
func (d *diag) addDaemon(ctx context.Context, folder, socket string) {
	client := api.NewClient(socket)
	for _, one := range []struct{ file, path string }{
		{"readyz.txt", "/readyz?verbose"},
		{"metrics.txt", "/metrics"},
		{"status.json", "/v1/status"},
		{"nodes.json", "/v1/nodes"},
		{"goroutines.txt", "/debug/pprof/goroutine?debug=1"},
		{"heap.pprof", "/debug/pprof/heap"},
		{"loglevel.txt", "/loglevel"},
	} {
		if one.path == "/v1/nodes" && folder == "edge" {
			continue // only a cloud lists nodes
		}
		asking, cancel := limited(ctx, diagTime)
		text, err := client.Get(asking, one.path)
		cancel()
		d.add(folder+"/"+one.file, text, err)
	}
}

// withoutSecretValues returns the keys of a configuration with their values. A secret is ***.
func withoutSecretValues(path string) ([]byte, error) {
	checked, err := conf.Check(path, environment())
	if err != nil {
		return []byte(err.Error() + "\n"), nil // the problems are what a person looks for
	}
	settings := make(conf.Settings)
	if checked.Cloud != nil {
		maps.Copy(settings, checked.Cloud.Settings())
	}
	if checked.Edge != nil {
		maps.Copy(settings, checked.Edge.Settings())
	}
	var b strings.Builder
	for _, w := range checked.Warnings {
		fmt.Fprintf(&b, "# warning: %s\n", w)
	}
	for _, key := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&b, "%s = %s\n", key, settings[key])
	}
	return []byte(b.String()), nil
}

// kernelFacts returns the settings of the kernel that the pages of docs/ name. A system without /proc has none.
func kernelFacts() []byte {
	var b strings.Builder
	for _, name := range []string{
		"version", "loadavg", "uptime",
		"sys/fs/file-nr",
		"sys/net/core/rmem_max", "sys/net/core/wmem_max", "sys/net/core/wmem_default", "sys/net/core/somaxconn",
		"sys/net/core/default_qdisc",
		"sys/net/ipv4/ip_forward", "sys/net/ipv4/ip_local_port_range", "sys/net/ipv4/ip_unprivileged_port_start",
		"sys/net/ipv4/tcp_available_congestion_control", "sys/net/ipv4/tcp_allowed_congestion_control",
		"sys/net/ipv4/tcp_congestion_control", "sys/net/ipv4/tcp_retries2", "sys/net/ipv4/tcp_mtu_probing",
		"sys/net/ipv4/tcp_rmem", "sys/net/ipv4/tcp_wmem", "sys/net/ipv4/tcp_syncookies",
		"sys/net/mptcp/enabled", "sys/net/mptcp/close_timeout", "sys/net/mptcp/stale_loss_cnt",
	} {
		text, err := os.ReadFile("/proc/" + name)
		if err != nil {
			text = []byte("cannot be read: " + err.Error())
		}
		fmt.Fprintf(&b, "%s: %s\n", strings.TrimPrefix(name, "sys/"), strings.TrimSpace(string(text)))
	}
	return []byte(b.String())
}
