package setup

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/net/http/httpproxy"
	"golang.org/x/term"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// maxJoinText is how many bytes ReadJoinToken reads at most: a token, and other text that the operator pasted
// with it.
const maxJoinText = 8 << 10

// ReadJoinToken reads a join token from file, or from in if file is "". A terminal does not show the token, and no
// error contains any part of the token.
func ReadJoinToken(ctx context.Context, in io.Reader, prompt io.Writer, file string) (auth.JoinToken, error) {
	var text []byte
	var err error
	terminal, isFile := in.(*os.File)
	switch {
	case strings.HasPrefix(file, auth.JoinPrefix):
		return auth.JoinToken{}, errors.New("--token-file is the name of a file, and a token on a command line " +
			"is seen by every user of this machine: make another one, and pipe it")
	case file != "":
		var f *os.File
		if f, err = os.Open(file); err == nil {
			text, err = io.ReadAll(io.LimitReader(f, maxJoinText))
			f.Close()
		}
	case isFile && term.IsTerminal(int(terminal.Fd())):
		fmt.Fprint(prompt, "Token (it is not shown): ")
		text, err = readHidden(ctx, int(terminal.Fd()))
		fmt.Fprintln(prompt)
	default:
		// Read one line, not all: a program may write the token and leave its end of the pipe open.
		text, err = interruptible(ctx, func() ([]byte, error) {
			return bufio.NewReader(io.LimitReader(in, maxJoinText)).ReadBytes('\n')
		})
		if errors.Is(err, io.EOF) {
			err = nil
		}
	}
	if err != nil {
		return auth.JoinToken{}, fmt.Errorf("reading the token: %w", err)
	}
	word := strings.Trim(strings.TrimSpace(string(text)), `'"`)
	switch {
	case word == "" && file != "":
		return auth.JoinToken{}, fmt.Errorf("%s is empty: write the token into it, tunnel1.…, "+
			"that `tunnel token create` prints on the cloud", file)
	case word == "":
		return auth.JoinToken{}, errors.New("there is no token on standard input: paste the line that " +
			"`tunnel token create` prints on the cloud, such as echo 'tunnel1.…' | sudo tunnel join")
	}
	token, err := auth.ParseJoinToken(word)
	if err != nil {
		return auth.JoinToken{}, err // the error says what to paste
	}
	return token, nil
}

// ForNode returns the token for one node. A token for several nodes does not say which node this machine is.
// ForNode then uses name, the value of --node; if name is "", it uses NODE_NAME or the host name.
func ForNode(token auth.JoinToken, name string, env conf.Env) (auth.JoinToken, error) {
	if token.Nodes == "" {
		if name != "" && name != string(token.Node) {
			return token, fmt.Errorf("--node is %s, and the token is for node %s", name, token.Node)
		}
		return token, nil
	}
	from := "--node"
	if name == "" {
		if name, from = env.NodeName, "NODE_NAME"; name == "" {
			name, from = strings.ToLower(env.HostName), "the host name"
		}
	}
	node, err := tunnel.ParseNodeName(name)
	if err == nil {
		err = node.MayJoin()
	}
	if err != nil {
		return token, fmt.Errorf("%w (it comes from %s): name the node with --node", err, from)
	}
	if !token.Nodes.Match(node) {
		return token, fmt.Errorf("the token is for nodes %s, and this is node %s (%s): name the node with --node",
			token.Nodes, node, from)
	}
	token.Node, token.Nodes = node, ""
	return token, nil
}

// ErrInterrupted is returned by Join and ReadJoinToken when their context is done.
var ErrInterrupted = errors.New("interrupted; you can run the command again")

// readHidden reads a line from a terminal without echo. Afterwards the terminal echoes again,
// also after an error or an interrupt.
func readHidden(ctx context.Context, fd int) ([]byte, error) {
	before, err := term.GetState(fd)
	if err != nil {
		return nil, err
	}
	defer term.Restore(fd, before) //nolint:errcheck // no other way to restore the terminal
	return interruptible(ctx, func() ([]byte, error) { return term.ReadPassword(fd) })
}

// interruptible returns the result of read, or ErrInterrupted as soon as ctx is done. In the second case the
// goroutine that runs read stays until the process ends: no call ends a blocked read of a terminal or a pipe.
func interruptible(ctx context.Context, read func() ([]byte, error)) ([]byte, error) {
	type result struct {
		text []byte
		err  error
	}
	done := make(chan result, 1) // capacity 1: the goroutine ends even if the result is not read
	go func() {
		text, err := read()
		done <- result{text, err}
	}()
	select {
	case r := <-done:
		return r.text, r.err
	case <-ctx.Done():
		return nil, ErrInterrupted
	}
}

// JoinConfig says how to make this machine a node.
type JoinConfig struct {
	Token   auth.JoinToken // for one node, see ForNode
	Shared  bool           // Token was for several nodes, and is good for each of them once
	Dir     string         // for the files
	Force   bool           // replace the files of another node, or of another cloud
	Systemd bool           // have systemd start the edge
	// How to reach the cloud. For zero values, Join takes the servers and the proxy of an existing configuration.
	// Without a configuration, Join dials the token's address, by the proxy that Environment names.
	Servers     []string          // in the form of dial.ParseServer
	Proxy       string            // in the form of dial.ParseProxy, without a password; "none": no proxy
	ProxyFile   string            // a file that holds only the URL of the proxy
	ProxyCA     string            // a file with the CAs of https:// proxies and wss:// servers
	Environment *httpproxy.Config // HTTPS_PROXY and NO_PROXY
	Host        Host
	Out         io.Writer // a line for each step
}

// joining is one run of Join.
type joining struct{ JoinConfig }

// stepError is the reason why a step of Join failed, and what the operator can do.
type stepError struct {
	step string
	err  error
	fix  string
	kind Kind
}

func (e *stepError) Error() string { return e.err.Error() }
func (e *stepError) Unwrap() error { return e.err }

// errReported stands for a failure that Join has already written to JoinConfig.Out.
var errReported = errors.New("not joined")

// Join checks the way to the cloud, gets a certificate, and writes the edge's files.
func Join(ctx context.Context, cfg JoinConfig) error {
	j := &joining{cfg}
	err := j.steps(ctx)
	if ctx.Err() != nil {
		return ErrInterrupted
	}
	failed, ok := errors.AsType[*stepError](err)
	switch {
	case err == nil:
		return nil
	case !ok:
		return err
	}
	fmt.Fprintf(j.Out, "FAIL  %s: %v\n      %s\n", failed.step, failed.err, failed.fix)
	return &Error{failed.kind, errReported}
}

// ok prints the line of a step that succeeded.
func (j *joining) ok(step, format string, args ...any) {
	fmt.Fprintf(j.Out, "ok    %-7s %s\n", step, fmt.Sprintf(format, args...))
}

// steps checks systemd and the folder before it contacts the cloud. If the edge could not run, or Join could not
// write the files, steps fails before the cloud makes a certificate, and the token stays unused.
func (j *joining) steps(ctx context.Context) error {
	var unit *systemdUnit
	if j.Systemd {
		dir, err := filepath.Abs(j.Dir)
		if err != nil {
			return err
		}
		if unit, err = newSystemdUnit(edgeService(), dir, j.Host); err != nil {
			return err
		}
	}
	files, err := newNodeFiles(j.JoinConfig)
	if err != nil {
		return err
	}
	way, err := newWay(j.JoinConfig, files.existing, j.ok)
	if err != nil {
		return err
	}
	if err = way.check(ctx); err != nil {
		return err
	}
	enrolled, err := way.enroll(ctx, files.hasCert())
	if err != nil {
		return err
	}
	written, err := files.write(enrolled, way)
	if err != nil {
		return err
	}
	j.ok("files", "%s", strings.Join(written, ", "))
	if unit == nil {
		j.explain(files)
		return nil
	}
	if err = unit.install(ctx); err != nil {
		return err
	}
	for _, line := range unit.running() {
		j.ok("systemd", "%s", line)
	}
	return nil
}

// explain prints the command that starts the edge.
func (j *joining) explain(files *nodeFiles) {
	if filepath.Dir(files.certPath) == stateDir { // an earlier join has installed the unit
		fmt.Fprintf(j.Out, "\nNode %s has joined. systemd runs its edge: to use the new files, restart it:\n"+
			"  %ssystemctl restart %s\n", j.Token.Node, j.Host.sudo(), edgeService().name())
		return
	}
	fmt.Fprintf(j.Out, "\nNode %s has joined. Start its edge:\n  %stunnel edge -c %s\n",
		j.Token.Node, j.Host.sudo(), shellQuote(filepath.Join(files.dir, edgeFile)))
	without := ""
	if j.Proxy != "" || j.ProxyFile != "" || j.ProxyCA != "" { // join refuses these flags: edge.toml has their values
		without = " and without --proxy, --proxy-file and --proxy-ca"
	}
	again := "run the same join once more with --systemd" + without
	if j.Shared {
		again = fmt.Sprintf("make a token for this node alone on the cloud (tunnel token create --node %s), and join by it "+
			"with --systemd%s", j.Token.Node, without)
	}
	fmt.Fprintf(j.Out, "or, to have systemd start it now and with the machine, %s.\n", again)
}
