package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/tunnel"
)

// askFlags are the flags of a command that sends a request to a running cloud or edge, over its admin socket.
type askFlags struct {
	config configFlag
	socket string
}

// register adds the flags to a command. names are the files that the command reads without -c.
func (a *askFlags) register(cmd *cobra.Command, names ...string) {
	a.config.register(cmd, names...)
	cmd.Flags().StringVar(&a.socket, "socket", "", "admin socket `PATH`, in place of the one that the configuration names")
}

// daemonSocket is the admin socket of a daemon.
type daemonSocket struct{ mode, path string }

// noSocketError is the error of a command that cannot find out the admin socket. It does not mean that the
// configuration is wrong for a daemon.
type noSocketError struct{ error }

// sockets returns the admin sockets of the daemons that the flags name. It never returns an empty list without
// an error.
func (a *askFlags) sockets() ([]daemonSocket, error) {
	if a.socket != "" {
		return []daemonSocket{{"", a.socket}}, nil
	}
	files, err := a.config.files()
	if err != nil {
		return nil, err
	}
	var all []daemonSocket
	for _, file := range files {
		s, err := conf.ReadSockets(file)
		if err != nil {
			if _, missing := os.Stat(file); missing != nil {
				err = noSocketError{err}
			}
			return nil, configError(err)
		}
		for _, d := range []struct {
			daemonSocket
			has bool
		}{{daemonSocket{"cloud", s.Cloud}, s.HasCloud}, {daemonSocket{"edge", s.Edge}, s.HasEdge}} {
			switch {
			case d.has && d.path != "":
				all = append(all, d.daemonSocket)
			case d.has:
				err = errors.Join(err, fmt.Errorf("%s names no admin socket: write socket = \"/run/tunnel-%s/admin.sock\" "+
					"in [mode.%[2]s.admin], and start the %[2]s again", file, d.mode))
			}
		}
		if err != nil {
			return nil, configError(noSocketError{err})
		}
	}
	if all == nil {
		return nil, configError(noSocketError{
			fmt.Errorf("%s configures neither a cloud nor an edge", strings.Join(files, ", ")),
		})
	}
	return all, nil
}

// cloud returns a client of the cloud that the flags name.
func (a *askFlags) cloud() (*api.Client, error) {
	return a.client("cloud", "this file configures an edge: run this on the cloud, or give the cloud's file")
}

// edge returns a client of the edge that the flags name.
func (a *askFlags) edge() (*api.Client, error) {
	return a.client("edge", "this file configures a cloud: run this on an edge, or give the edge's file")
}

// client returns a client of the daemon with a mode. If the flags name a daemon of the other mode alone, the error has
// the text other.
func (a *askFlags) client(mode, other string) (*api.Client, error) {
	all, err := a.sockets()
	if err != nil {
		return nil, err
	}
	for _, s := range all {
		if s.mode == mode || s.mode == "" {
			return api.NewClient(s.path), nil
		}
	}
	return nil, configError(errors.New(other))
}

// askEach calls f for the socket of each daemon that the flags name. An error of one daemon does not end the loop.
func askEach(ask *askFlags, f func(s daemonSocket, name string) error) error {
	sockets, err := ask.sockets()
	if err != nil {
		return err
	}
	var failure error
	for _, s := range sockets {
		if err := f(s, cmp.Or(s.mode, s.path)); err != nil {
			failure = also(failure, err)
		}
	}
	return failure
}

// also joins the errors of two daemons, of which the first may be nil. The exit code is that of the first error.
func also(first, second error) error {
	if first == nil {
		return second
	}
	code := exitRuntime
	if exit, ok := errors.AsType[*exitError](first); ok {
		code = exit.code
	}
	return &exitError{code, errors.Join(first, second)}
}

// askTimeout is how long a request to a daemon of this machine may take. The daemon may ask other replicas meanwhile.
const askTimeout = 10 * time.Second

// limited returns ctx with the time that a request to a daemon may take. Without it a command would wait forever for a
// daemon that hangs, and dpkg with it: the packages' scripts run tunnel restart. Tests shorten the time.
var limited = context.WithTimeout //nolint:gochecknoglobals // only tests set it

// completeTimeout is how long a completion may take: a person waits for the shell.
const completeTimeout = 2 * time.Second

// nodeNames completes names of nodes. It asks the cloud.
func (a *askFlags) nodeNames(
	cmd *cobra.Command, args []string, prefix string,
) ([]cobra.Completion, cobra.ShellCompDirective) {
	client, err := a.cloud()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := limited(cmd.Context(), completeTimeout)
	defer cancel()
	list, err := client.Nodes(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []cobra.Completion
	for _, n := range list.Nodes {
		if strings.HasPrefix(n.Name, prefix) && !slices.Contains(args, n.Name) {
			names = append(names, cobra.CompletionWithDesc(tunnel.Printable(n.Name), tunnel.Printable(string(n.State))))
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// firstNode completes the name of a node as the first argument, and nothing else.
func (a *askFlags) firstNode(
	cmd *cobra.Command, args []string, prefix string,
) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.nodeNames(cmd, args, prefix)
}

// outputFlag is the flag -o.
type outputFlag struct {
	form  string
	forms []string
	wrote bool // a document was written, so in YAML "---" comes before the next one
}

// register adds the flag to a command. The first of forms is the default.
func (o *outputFlag) register(cmd *cobra.Command, forms ...string) {
	o.forms = forms
	cmd.Flags().StringVarP(&o.form, "output", "o", forms[0], strings.Join(forms, ", "))
	err := cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(forms, cobra.ShellCompDirectiveNoFileComp))
	if err != nil {
		panic(err) // the flag was added above
	}
}

// check returns an error if the command cannot print the form that -o asks for.
func (o *outputFlag) check() error {
	if !slices.Contains(o.forms, o.form) {
		return &exitError{exitUsage, fmt.Errorf("-o is one of %s, not %q", strings.Join(o.forms, ", "), o.form)}
	}
	return nil
}

// encode writes v if the form of the flag is for programs (JSON or YAML). It returns false if the form is for people.
func (o *outputFlag) encode(w io.Writer, v any) (bool, error) { return o.write(w, v, "  ") }

// encodeLine is encode with JSON on one line, for commands that write one value after another.
func (o *outputFlag) encodeLine(w io.Writer, v any) (bool, error) { return o.write(w, v, "") }

// write writes v as a document. indent is the indentation of JSON; "": JSON on one line.
func (o *outputFlag) write(w io.Writer, v any, indent string) (bool, error) {
	var text bytes.Buffer
	switch o.form {
	case "json":
		e := json.NewEncoder(&text)
		e.SetIndent("", indent)
		if err := e.Encode(v); err != nil {
			return true, err
		}
	case "yaml":
		y, err := yaml.Marshal(v)
		if err != nil {
			return true, err
		}
		if o.wrote {
			text.WriteString("---\n")
		}
		text.Write(y)
	default:
		return false, nil
	}
	o.wrote = true
	_, err := w.Write(text.Bytes())
	return true, err
}

// failed returns the error of a request to a daemon, with its exit code.
func failed(err error) error {
	code := exitRuntime
	if failure, ok := errors.AsType[*api.Failure](err); ok {
		switch failure.Code {
		case "", "no-such-service": // a Service is no node
		case api.CodeConfiguration:
			code = exitConfig
		case "denied", "refused", api.CodeNotStarted:
			code = exitRefused
		default:
			code = exitAway
		}
	}
	return &exitError{code, err}
}

// span returns a duration in its two largest units, such as 3d4h.
func span(d time.Duration) string {
	if d < 0 {
		return "-" + span(-d)
	}
	s := int64(d / time.Second)
	units := []struct {
		name string
		size int64
	}{{"y", 365 * 86400}, {"d", 86400}, {"h", 3600}, {"m", 60}, {"s", 1}}
	for i, u := range units {
		if s < u.size {
			continue
		}
		text := fmt.Sprintf("%d%s", s/u.size, u.name)
		if i+1 < len(units) {
			if rest := s % u.size / units[i+1].size; rest > 0 {
				text += fmt.Sprintf("%d%s", rest, units[i+1].name)
			}
		}
		return text
	}
	return "0s"
}

// size returns a number of bytes for people, such as 1.5MB.
func size(n uint64) string {
	if n < 1000 {
		return fmt.Sprintf("%dB", n)
	}
	v, unit := float64(n)/1000, 0
	for units := "kMGTPE"; v >= 999.95 && unit < len(units)-1; unit++ {
		v /= 1000
	}
	return fmt.Sprintf("%.1f%cB", v, "kMGTPE"[unit])
}

// millis returns seconds as milliseconds for people; "-" for 0.
func millis(seconds float64) string {
	if seconds == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1fms", seconds*1000)
}

// printTable prints n lines below a head, or the text none if n is 0. line returns the cells of a line.
func printTable(w io.Writer, head string, n int, none string, line func(i int) []string) error {
	if n == 0 {
		_, err := fmt.Fprintln(w, none)
		return err
	}
	out := bufio.NewWriter(w) // a table writes each cell by itself
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, head)
	for i := range n {
		cells := line(i)
		for k := range cells { // some of the text comes from nodes, or from the cluster
			cells[k] = tunnel.Printable(cells[k])
		}
		fmt.Fprintln(table, strings.Join(cells, "\t"))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	return out.Flush()
}
