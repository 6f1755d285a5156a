package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/net/http/httpproxy"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/check"
)

// checkFlags are the flags of tunnel check.
type checkFlags struct {
	config       configFlag
	output       outputFlag
	wait         time.Duration
	kubelet, dns string
	apiserver    string
}

func newCheckCommand() *cobra.Command {
	var f checkFlags
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Find what is wrong with the cloud or the edge of this machine, and what to do",
		Long: `check looks at everything that can keep the edge or the cloud of this machine from working.
Each line is ok, warn, fail or skipped. A line that is warn or fail names the next step.

On an edge: the configuration, the node's token or certificate, the way to the cloud step by step, whether the cloud
lets the node join, the daemon, and the kubelet. On a cloud: the daemon, the ports, the certificates, the rights in
Kubernetes, the names of nodes, and kube-apiserver's flags. docs/check.md explains every line.

check changes nothing, and a live session continues. Run it as the user of the daemon or as root, since it reads the
same files.

Exit codes: 0 nothing failed, 1 something failed, 2 wrong command line.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	f.config.register(cmd, cloudFile, edgeFile)
	f.output.register(cmd, "text", "json", "yaml")
	cmd.Flags().DurationVar(&f.wait, "wait", 0, "repeat until nothing fails, for at most this `DURATION`, such as 2m")
	cmd.Flags().StringVar(&f.kubelet, "kubelet", "",
		"`HOST:PORT` of this node's kubelet; default: "+check.DefaultKubelet+", if this machine has a kubelet")
	cmd.Flags().StringVar(&f.dns, "dns", "", "`HOST:PORT` of the DNS server that kube-apiserver asks; "+
		"default: the cloud's own, if it has one")
	cmd.Flags().StringVar(&f.apiserver, "apiserver", "", "`FILE` with kube-apiserver's flags: its manifest, or k3s' "+
		"config.yaml; default: "+check.DefaultManifest+", if it exists")
	return cmd
}

// checkReport is the output of tunnel check for programs.
type checkReport struct {
	APIVersion string       `json:"api_version"`
	Time       time.Time    `json:"time"`
	OK         bool         `json:"ok"`
	Checks     []check.Line `json:"checks"`
}

// waitInterval is the pause between two rounds of --wait.
const waitInterval = 2 * time.Second

func (f *checkFlags) run(cmd *cobra.Command) error {
	if err := f.output.check(); err != nil {
		return err
	}
	for flag, addr := range map[string]string{"--kubelet": f.kubelet, "--dns": f.dns} {
		if _, _, err := net.SplitHostPort(addr); addr != "" && err != nil {
			return &exitError{exitUsage, fmt.Errorf("%s is HOST:PORT, not %q", flag, addr)}
		}
	}
	files, err := f.config.files()
	if err != nil {
		return err
	}
	ctx, out := cmd.Context(), cmd.OutOrStdout()
	began := time.Now()
	var printer func(check.Line) // prints each line at once; nil: all lines are printed at the end
	if f.wait == 0 && f.output.form == "text" {
		printer = linePrinter(out)
	}
	lines := f.round(ctx, files, printer)
	waiting, cancel := context.WithDeadline(ctx, began.Add(f.wait))
	defer cancel()
	for last := ""; len(check.Failed(lines)) > 0 && waiting.Err() == nil; {
		if first := check.Failed(lines)[0]; first.Group+first.Name != last {
			last = first.Group + first.Name
			fmt.Fprintf(cmd.ErrOrStderr(), "waiting: %s, %s: %s\n", first.Group, first.Name, first.Text)
		}
		select {
		case <-time.After(waitInterval):
			if next := f.round(waiting, files, nil); waiting.Err() == nil { // ignore a round that the end of --wait cut off
				lines = next
			}
		case <-waiting.Done():
		}
	}
	bad := check.Failed(lines)
	report := checkReport{APIVersion: "v1", Time: time.Now().UTC(), OK: len(bad) == 0, Checks: lines}
	done, err := f.output.encode(out, report)
	if !done && printer == nil {
		printer = linePrinter(out)
		for _, l := range lines {
			printer(l)
		}
	}
	switch {
	case err != nil:
		return err
	case ctx.Err() != nil:
		return &exitError{exitRuntime, errors.New("stopped by a signal: not everything was looked at")}
	case len(bad) > 0:
		return &exitError{exitRuntime, fmt.Errorf("%d of %d checks failed", len(bad), len(lines))}
	}
	return nil
}

// linePrinter returns a function that prints lines, each group under its heading.
func linePrinter(w io.Writer) func(check.Line) {
	group := ""
	return func(l check.Line) {
		if l.Group != group {
			group = l.Group
			fmt.Fprintln(w, group)
		}
		text := l.Text
		if l.State == check.StateSkipped {
			text = "(" + text + ")"
		}
		fmt.Fprintf(w, "  %-7s  %-13s  %s\n", l.State, l.Name, text)
		if l.Do != "" {
			fmt.Fprintf(w, "  %-7s  %-13s  do: %s\n", "", "", l.Do)
		}
	}
}

// round checks every mode of every file.
func (f *checkFlags) round(ctx context.Context, files []string, tell func(check.Line)) (lines []check.Line) {
	for _, file := range files {
		lines = append(lines, check.Run(ctx, f.list(file), tell)...)
	}
	return lines
}

// list returns the checks of a file. If the file has problems, the list has only these: other checks would mislead.
func (f *checkFlags) list(file string) []check.Check {
	const group = "configuration"
	log := slog.New(slog.DiscardHandler)
	checked, err := conf.Check(file, environment())
	if err != nil {
		return problems(group, file, err)
	}
	var list []check.Check
	add := func(mode string, more func() ([]check.Check, error)) {
		others, err := more()
		if err != nil {
			list = append(list, problems(group, file, err)...)
			return
		}
		list = append(list, check.Found(group, mode, check.OK("%s", file)))
		for _, w := range checked.Warnings {
			list = append(list, check.Found(group, mode, check.Warn("change the key that the text names", "%s", w)))
		}
		checked.Warnings = nil // show them once: each mode has the warnings of both modes
		list = append(list, others...)
	}
	if checked.Cloud != nil {
		add("cloud", func() ([]check.Check, error) { return f.cloud(checked.Cloud, log) })
	}
	if checked.Edge != nil {
		add("edge "+string(checked.Edge.Node), func() ([]check.Check, error) { return f.edge(checked.Edge, log) })
	}
	return list
}

// problems returns a failed check for each problem of a configuration, and a skipped check for everything else.
func problems(group, file string, err error) (list []check.Check) {
	for line := range strings.SplitSeq(err.Error(), "\n") {
		list = append(list, check.Found(group, "file",
			check.Fail("correct it; tunnel config check -c "+file+" looks at the file alone", "%s", line)))
	}
	return append(list, check.Found("everything else", "", check.Skipped("the configuration comes first")))
}

// cloud returns the checks of a cloud.
func (f *checkFlags) cloud(c *conf.Cloud, log *slog.Logger) ([]check.Check, error) {
	w, err := wireCloud(c, log, place{})
	if err != nil {
		return nil, err
	}
	return check.Cloud(check.CloudConfig{
		Conf: c, Listeners: w.listeners, Kubernetes: w.cluster.client, DNS: f.dns, Manifest: f.apiserver,
	}), nil
}

// edge returns the checks of an edge.
func (f *checkFlags) edge(e *conf.Edge, log *slog.Logger) ([]check.Check, error) {
	w, err := wireEdge(e, log, place{})
	if err != nil {
		return nil, err
	}
	ways, err := dialConfig(e, w.files)
	if err != nil {
		return nil, err
	}
	cfg := check.EdgeConfig{
		Conf: e, Dial: ways, Token: w.proof.token, Software: software(), Kubelet: f.kubelet,
		TLS: func() *tls.Config { return w.proof.tls(e.ServerName, w.roots()) }, Environment: httpproxy.FromEnvironment(),
	}
	if w.told != nil {
		servers := toldServers(w.told)
		for _, s := range ways.Servers {
			if !slices.Contains(servers, s) {
				servers = append(servers, s)
			}
		}
		cfg.Dial.Servers, cfg.Told, cfg.ToldFile = servers, w.told.Trusted, toldFile(e)
	}
	return check.Edge(cfg), nil
}
