// Devcerts makes the certificates and tokens that conf/cloud.toml and conf/edge.toml name, so that a
// cloud and an edge can be started on one machine:
//
//	go run ./conf/devcerts [-force] [DIR]
//
// The default for DIR is conf/dev. The files are for trials only. The key of their CA is never stored, so
// a certificate cannot be added later: -force makes all files again. An installation takes its
// certificates from its own CA, or from cert-manager.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"tunnel.example/tunnel/pkg/auth"
)

const (
	defaultDir = "conf/dev"
	node       = "edge1" // the node of conf/edge.toml
	lifetime   = 365 * 24 * time.Hour

	public = 0o644 // mode of certificates
	secret = 0o600 // mode of keys and tokens
)

// Exit codes, the same as tunnel's.
const (
	exitRuntime = 1
	exitUsage   = 2
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// run makes the files and returns the exit code.
func run(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("devcerts", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprintf(stderr, "usage: devcerts [-force] [DIR]\n\n"+
			"makes throwaway certificates and tokens in DIR (%s)\n", defaultDir)
		flags.PrintDefaults()
	}
	force := flags.Bool("force", false, "replace files that are there already")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return exitUsage
	}
	dir := defaultDir
	switch flags.NArg() {
	case 0:
	case 1:
		dir = flags.Arg(0)
	default:
		flags.Usage()
		return exitUsage
	}
	files, err := makeFiles()
	if err == nil {
		err = write(dir, files, *force)
	}
	if err != nil {
		fmt.Fprintln(stderr, "devcerts:", err)
		return exitRuntime
	}
	for _, f := range files {
		fmt.Fprintf(stdout, "%-24s %s\n", filepath.Join(dir, f.name), f.what)
	}
	if filepath.Clean(dir) == defaultDir {
		fmt.Fprint(stdout, "\nnow run, each in a terminal of its own:\n"+
			"  go run ./cmd/tunnel cloud -c conf/cloud.toml\n"+
			"  go run ./cmd/tunnel edge -c conf/edge.toml\n")
	} else {
		fmt.Fprint(stdout, "\nnow name these files in your configuration "+
			"(conf/cloud.toml and conf/edge.toml show where), and check it:\n"+
			"  go run ./cmd/tunnel config check -c FILE\n")
	}
	return 0
}

// file is a file to write.
type file struct {
	name    string // within DIR
	what    string // its purpose, for people
	mode    fs.FileMode
	content []byte
}

// makeFiles makes the content of all files, in memory.
func makeFiles() ([]file, error) {
	ca, err := auth.NewCA("tunnel development CA", lifetime)
	if err != nil {
		return nil, err
	}
	loopback := []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback}
	files := []file{{"ca.crt", "the authority of the certificates below", public, ca.CertPEM()}}
	for _, l := range []struct {
		name, what string
		auth.Leaf
	}{
		{"cloud", "the cloud, towards edges and other replicas", auth.Leaf{
			CommonName: "tunnel.cloud.io",
			DNSNames:   []string{"tunnel.cloud.io", "localhost"},
			IPs:        loopback,
			Server:     true,
			Client:     true,
		}},
		{"https", "the https front door, in the place of " + node + "'s kubelet", auth.Leaf{
			CommonName: node,
			DNSNames:   []string{node, "localhost"},
			IPs:        loopback,
			Server:     true,
		}},
		{"client", "a caller of the https front door, in the place of kube-apiserver", auth.Leaf{
			CommonName: "kube-apiserver-kubelet-client",
			Client:     true,
		}},
	} {
		cert, key, err := ca.Issue(l.Leaf)
		if err != nil {
			return nil, err
		}
		files = append(files,
			file{l.name + ".crt", l.what, public, cert},
			file{l.name + ".key", "its key", secret, key})
	}
	token := auth.NewToken()
	return append(files,
		file{"tokens", "the cloud's token file", secret, []byte(node + ":" + token.Hashed() + "\n")},
		file{node + ".token", "the token of " + node, secret, []byte(token.Reveal() + "\n")},
	), nil
}

// write writes files to dir. Without force, it writes nothing if one of them exists.
func write(dir string, files []file, force bool) error {
	if !force {
		var there []string
		for _, f := range files {
			path := filepath.Join(dir, f.name)
			if _, err := os.Lstat(path); err == nil {
				there = append(there, path)
			} else if !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		if there != nil {
			return fmt.Errorf("already there: %s; use -force to replace all of them", strings.Join(there, ", "))
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, f := range files {
		if err := replace(filepath.Join(dir, f.name), f); err != nil {
			return err
		}
	}
	return nil
}

// replace writes a temporary file beside path and renames it over path. A running cloud sees the old
// file or the new one, and the mode of the old file is not kept.
func replace(path string, f file) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+f.name+".*") // mode 0600
	if err != nil {
		return err
	}
	_, err = tmp.Write(f.content)
	err = errors.Join(err, tmp.Chmod(f.mode), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		os.Remove(tmp.Name()) //nolint:errcheck // the first error is reported
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}
