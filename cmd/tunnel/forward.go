package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/tunnel"
)

// forwards is the answer to GET /v1/forwards.
type forwards struct {
	Forwards []forward `json:"forwards"`
}

// forward is a TCP port of a running cloud.
type forward struct {
	conf.Forward

	From string `json:"from"` // "configuration", or "forwards": tunnel forward can remove it
}

// Values of forward.From.
const (
	fromConfiguration = "configuration"
	fromForwards      = "forwards"
)

// handlers are the paths of the admin socket.
func (r *cloudReloader) handlers() map[string]http.Handler {
	all := r.reloader.handlers()
	all["GET /v1/forwards"] = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		answer(w, forwards{r.listForwards()}, nil)
	})
	all["POST /v1/forwards"] = http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		var f conf.Forward
		body := json.NewDecoder(http.MaxBytesReader(w, q.Body, maxForward))
		body.DisallowUnknownFields()
		if err := body.Decode(&f); err != nil {
			answer(w, nil, fmt.Errorf("the body is not a forward: %w", err))
			return
		}
		done, err := r.changeForwards(context.WithoutCancel(q.Context()), func(all []conf.Forward) ([]conf.Forward, error) {
			i := slices.IndexFunc(all, func(old conf.Forward) bool { return old.Listen == f.Listen })
			switch {
			case i < 0:
				return append(all, f), nil
			case !q.URL.Query().Has("replace"):
				return nil, conflictf("%s leads to %s already: replace it with --replace", f.Listen, all[i].Target)
			}
			all[i] = f
			return all, nil
		})
		answer(w, done, err)
	})
	all["DELETE /v1/forwards"] = http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		listen := q.URL.Query().Get("listen")
		done, err := r.changeForwards(context.WithoutCancel(q.Context()), func(all []conf.Forward) ([]conf.Forward, error) {
			i := slices.IndexFunc(all, func(f conf.Forward) bool { return f.Listen == listen })
			if i < 0 {
				return nil, r.notRemoved(listen)
			}
			return slices.Delete(all, i, i+1), nil
		})
		answer(w, done, err)
	})
	return all
}

// maxForward bounds a request, in bytes.
const maxForward = 64 << 10

// notRemoved says why a port cannot be removed. The caller holds mu.
func (r *cloudReloader) notRemoved(listen string) error {
	for _, l := range r.loaded.TCP {
		if l.Listen == listen {
			return conflictf("%s is in the configuration: remove the line there, and run tunnel reload", listen)
		}
	}
	return conflictf("there is no forward %q: tunnel forward ls lists them", listen)
}

// listForwards returns all TCP ports, in the order of their address.
func (r *cloudReloader) listForwards() []forward {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := []forward{} // not nil, for JSON
	for _, l := range r.loaded.TCP {
		f := forward{conf.Forward{Listen: l.Listen, Target: l.Target}, fromConfiguration}
		if node := cmp.Or(string(l.Node), strings.Join(l.Among, ",")); node != "" {
			f.Target = node + "/" + l.Target
		}
		for _, p := range l.Allow {
			f.Allow = append(f.Allow, p.String())
		}
		for _, p := range l.ProxyFrom {
			f.ProxyFrom = append(f.ProxyFrom, p.String())
		}
		if l.SendProxy != 0 {
			f.SendProxy = fmt.Sprintf("v%d", l.SendProxy)
		}
		if r.loaded.InForwards(l.Listen) {
			f.From = fromForwards
		}
		list = append(list, f)
	}
	return list
}

// changeForwards replaces the lines of the file of forwards, and lets them take effect. It does not read the main file
// again. If it returns an error, neither the file nor the front door has changed.
func (r *cloudReloader) changeForwards(
	ctx context.Context, change func([]conf.Forward) ([]conf.Forward, error),
) (*reloaded, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.successor != 0 {
		return nil, errLeft
	}
	all, err := r.loaded.ReadForwards()
	if err == nil {
		all, err = change(all)
	}
	if err != nil {
		return nil, err
	}
	c, err := r.loaded.WithForwards(all)
	if err != nil {
		return nil, err
	}
	next, err := r.candidate(c)
	if err != nil {
		return nil, err
	}
	if before, err := r.candidate(r.loaded); err == nil { // leave out warnings that an earlier reload has shown
		next.warnings = slices.DeleteFunc(next.warnings, func(w string) bool { return slices.Contains(before.warnings, w) })
	}
	return r.applyLocked(ctx, "forwards changed", next, func() error {
		if err := c.WriteForwards(all); err != nil {
			return fmt.Errorf("%w; forwards in [mode.cloud.admin] must name a file in a folder that the cloud may "+
				"write to", err)
		}
		if err := r.syncFolder(filepath.Dir(c.Forwards)); err != nil { // the file has changed, so the ports change
			r.log.Error("forwards are written, but a loss of power could bring the old ones back", "target", c.Forwards,
				"err", err)
		}
		return nil
	})
}

func newForwardCommand() *cobra.Command {
	group := newGroup("forward", "Add, remove and list TCP ports of a running cloud")
	group.AddCommand(newForwardAddCommand(), newForwardRmCommand(), newForwardLsCommand())
	return group
}

// forwardFlags are the flags of the three commands.
type forwardFlags struct {
	ask    askFlags
	output outputFlag
}

// register adds the flags to a command. The first of forms is the default.
func (f *forwardFlags) register(cmd *cobra.Command, forms ...string) {
	f.ask.register(cmd, cloudFile)
	f.output.register(cmd, forms...)
}

// call sends a request to the cloud.
func (f *forwardFlags) call(ctx context.Context, method, path string, body, v any) error {
	if err := f.output.check(); err != nil {
		return err
	}
	client, err := f.ask.cloud()
	if err != nil {
		return err
	}
	ctx, cancel := limited(ctx, reloadTimeout)
	defer cancel()
	if err = client.Call(ctx, method, path, body, v); err != nil {
		return failed(err)
	}
	return nil
}

// change sends a request that changes the forwards, and prints what has changed.
func (f *forwardFlags) change(cmd *cobra.Command, method, path string, body any) error {
	done := new(reloaded)
	if err := f.call(cmd.Context(), method, path, body, done); err != nil {
		return err
	}
	if f.output.form == "text" {
		done.Restart = nil // these keys do not concern this command
	}
	return printReloaded(cmd, "cloud", done, &f.output)
}

// listens completes the addresses of ports that tunnel forward can change. It asks the cloud.
func (f *forwardFlags) listens(cmd *cobra.Command, prefix string) ([]cobra.Completion, cobra.ShellCompDirective) {
	const directive = cobra.ShellCompDirectiveNoFileComp
	client, err := f.ask.cloud()
	if err != nil {
		return nil, directive
	}
	ctx, cancel := limited(cmd.Context(), completeTimeout)
	defer cancel()
	var list forwards
	if err = client.Call(ctx, http.MethodGet, "/v1/forwards", nil, &list); err != nil {
		return nil, directive
	}
	var all []cobra.Completion
	for _, one := range list.Forwards {
		if one.From == fromForwards && strings.HasPrefix(one.Listen, prefix) {
			all = append(all, cobra.CompletionWithDesc(tunnel.Printable(one.Listen), tunnel.Printable(one.Target)))
		}
	}
	return all, directive
}

// nodesBeforeTarget completes NODE/ of NODE/TARGET. The target follows without a space.
func (f *forwardFlags) nodesBeforeTarget(
	cmd *cobra.Command, prefix string,
) ([]cobra.Completion, cobra.ShellCompDirective) {
	if strings.Contains(prefix, "/") {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	names, directive := f.ask.nodeNames(cmd, nil, prefix)
	for i, name := range names {
		node, state, _ := strings.Cut(name, "\t")
		names[i] = cobra.CompletionWithDesc(node+"/", state)
	}
	return names, directive | cobra.ShellCompDirectiveNoSpace
}

// wordArgs returns a check that a command has these arguments.
func wordArgs(words ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != len(words) {
			return fmt.Errorf("%s takes %s, not %d arguments", cmd.CommandPath(), strings.Join(words, " and "), len(args))
		}
		return nil
	}
}

func newForwardAddCommand() *cobra.Command {
	var flags forwardFlags
	var f conf.Forward
	var replace bool
	cmd := &cobra.Command{
		Use:   "add LISTEN NODE/TARGET",
		Short: "Open a TCP port of the running cloud",
		Long: `add opens a TCP port of the running cloud, which leads to a target behind a node. The cloud keeps the
port in the file that forwards in [mode.cloud.admin] names, also over a restart. A port that is not on
loopback needs --allow.

  tunnel forward add 127.0.0.1:2222 edge1/127.0.0.1:22
  tunnel forward add 0.0.0.0:5432 edge1/10.0.0.7:5432 --allow 10.0.0.0/8

Exit codes: 0 open, 1 the port leads elsewhere already, or no cloud answers; 2 wrong command line; 3 the port
cannot be opened, or is not permitted.`,
		Args: wordArgs("LISTEN", "NODE/TARGET"),
		RunE: func(cmd *cobra.Command, args []string) error {
			f.Listen, f.Target = args[0], args[1]
			if node, _, ok := strings.Cut(f.Target, "/"); !ok || node == "" {
				return &exitError{exitUsage, errors.New("name the node before the target, as in edge1/127.0.0.1:22")}
			}
			path := "/v1/forwards"
			if replace {
				path += "?replace"
			}
			return flags.change(cmd, http.MethodPost, path, f)
		},
	}
	cmd.ValidArgsFunction = func(
		cmd *cobra.Command, args []string, prefix string,
	) ([]cobra.Completion, cobra.ShellCompDirective) {
		switch {
		case len(args) == 0 && replace:
			return flags.listens(cmd, prefix)
		case len(args) == 1:
			return flags.nodesBeforeTarget(cmd, prefix)
		}
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	flags.register(cmd, "text", "json", "yaml")
	cmd.Flags().StringSliceVar(&f.Allow, "allow", nil, "`networks` that may connect, as in [mode.cloud.tcpallow]")
	cmd.Flags().StringSliceVar(&f.ProxyFrom, "proxyfrom", nil, "`networks` of balancers, as in [mode.cloud.tcpproxyfrom]")
	cmd.Flags().StringVar(&f.SendProxy, "sendproxy", "", "`v1` or v2, as in [mode.cloud.tcpsendproxy]")
	cmd.Flags().BoolVar(&replace, "replace", false, "replace the forward that has the port; its conns go on")
	return cmd
}

func newForwardRmCommand() *cobra.Command {
	var flags forwardFlags
	cmd := &cobra.Command{
		Use:   "rm LISTEN",
		Short: "Close a TCP port that tunnel forward add has opened",
		Long: `rm closes a TCP port that "tunnel forward add" has opened. Its conns go on. To close a port of the
configuration, remove its line and run "tunnel reload".

  tunnel forward rm 127.0.0.1:2222

Exit codes: 0 closed, 1 no such port, the configuration has it, or no cloud answers; 3 no admin socket is
configured, or the file of forwards cannot be written.`,
		Args: wordArgs("LISTEN"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return flags.change(cmd, http.MethodDelete, "/v1/forwards?"+url.Values{"listen": args}.Encode(), nil)
		},
		ValidArgsFunction: func(
			cmd *cobra.Command, args []string, prefix string,
		) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return flags.listens(cmd, prefix)
		},
	}
	flags.register(cmd, "text", "json", "yaml")
	return cmd
}

func newForwardLsCommand() *cobra.Command {
	var flags forwardFlags
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the TCP ports of the running cloud",
		Long: `ls lists the TCP ports of the running cloud. The column FROM says whether a port is in the
configuration, or in the file of "tunnel forward".

Exit codes: 0 ok, 1 no cloud answers, 3 the configuration names no admin socket of a cloud.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var list forwards
			if err := flags.call(cmd.Context(), http.MethodGet, "/v1/forwards", nil, &list); err != nil {
				return err
			}
			if encoded, err := flags.output.encode(cmd.OutOrStdout(), list); encoded {
				return err
			}
			const head = "LISTEN\tTARGET\tALLOW\tFROM"
			return printTable(cmd.OutOrStdout(), head, len(list.Forwards), "no ports", func(i int) []string {
				f := &list.Forwards[i]
				return []string{f.Listen, f.Target, cmp.Or(strings.Join(f.Allow, ","), "loopback"), f.From}
			})
		},
	}
	flags.register(cmd, "table", "json", "yaml")
	return cmd
}
