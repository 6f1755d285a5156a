package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/tunnel"
)

func newCertCommand() *cobra.Command {
	cert := newGroup("cert", "See and renew the certificates of a cloud and its nodes")
	cert.AddCommand(newCertStatusCommand(), newCertRenewCommand(), newCertRotateCommand())
	return cert
}

func newCertStatusCommand() *cobra.Command {
	var ask askFlags
	var output outputFlag
	var expiring time.Duration
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show who signed which certificate, and when it ends",
		Long: `status shows the certificates of the cloud and the edge of this machine. On a cloud: the CAs, the certificate
of each replica, and the newest certificate of each node, sorted by its end. A node that is away is shown with the
certificate that the cloud remembers. On an edge: its own certificate, when the edge renews it at the latest, and
the CAs by which it verifies the cloud.

  tunnel cert status
  tunnel cert status --expiring 720h     what ends within 30 days

Run it as root or as the user of the daemon.

Exit codes: 0 ok, 1 the list is incomplete or the daemon does not answer, 5 with --expiring: something ends by then.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.check(); err != nil {
				return err
			}
			if expiring < 0 {
				return &exitError{exitUsage, errors.New("--expiring is not negative")}
			}
			sockets, err := ask.sockets()
			if err != nil {
				return err
			}
			ctx, cancel := limited(cmd.Context(), askTimeout)
			defer cancel()
			var errs []error
			ending := 0
			for _, s := range sockets {
				list, err := api.NewClient(s.path).Certificates(ctx)
				if err != nil {
					errs = append(errs, err)
					continue
				}
				if cmd.Flags().Changed("expiring") {
					ending += onlyEnding(list, list.Time.Add(expiring))
				}
				if err = printCertificates(cmd.OutOrStdout(), list, &output); err != nil {
					return err
				}
				for _, why := range list.Incomplete {
					fmt.Fprintln(cmd.ErrOrStderr(), "warning: the list is incomplete: "+tunnel.Printable(why))
					errs = append(errs, errors.New("the list is incomplete"))
				}
				for _, p := range list.Processes {
					if p.Err != "" {
						errs = append(errs, fmt.Errorf("%s: %s", p.Replica, tunnel.Printable(p.Err)))
					}
				}
			}
			switch {
			case len(errs) > 0:
				return &exitError{exitRuntime, errors.Join(errs...)}
			case ending > 0:
				return &exitError{exitAway, fmt.Errorf("%d certificates end within %s", ending, span(expiring))}
			}
			return nil
		},
	}
	ask.register(cmd, cloudFile, edgeFile)
	output.register(cmd, "table", "wide", "json", "yaml")
	cmd.Flags().DurationVar(&expiring, "expiring", 0, "show only what ends within this time, such as 720h")
	return cmd
}

func newCertRenewCommand() *cobra.Command {
	var ask askFlags
	var output outputFlag
	var all bool
	cmd := &cobra.Command{
		Use:   "renew [NODE... | --all]",
		Short: "Have edges renew their certificates now",
		Long: `renew asks the edges of nodes to renew their certificates now; with --all, those of every connected node. The
edges spread it over some time, so that the cloud signs about ten certificates a second. tunnel cert status shows what
has been renewed. On an edge, without arguments, renew renews the edge's own certificate, and waits for it.

  tunnel cert renew edge1 edge2
  tunnel cert renew --all

Exit codes: 0 asked, or renewed; 1 failed, a named node cannot be asked, or --all could ask none; 5 a node is
not connected.`,
		Args: func(_ *cobra.Command, names []string) error {
			if all && len(names) > 0 {
				return errors.New("name nodes, or say --all")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, names []string) error {
			if err := output.check(); err != nil {
				return err
			}
			if all || len(names) > 0 {
				return renewNodes(cmd, &ask, &output, names)
			}
			return renewOwn(cmd, &ask, &output)
		},
		ValidArgsFunction: ask.nodeNames,
	}
	ask.register(cmd, cloudFile, edgeFile)
	output.register(cmd, "text", "json", "yaml")
	cmd.Flags().BoolVar(&all, "all", false, "every connected node")
	return cmd
}

// renewNodes asks edges to renew their certificates; without names, all.
func renewNodes(cmd *cobra.Command, ask *askFlags, output *outputFlag, names []string) error {
	client, err := ask.cloud()
	if err != nil {
		return err
	}
	ctx, cancel := limited(cmd.Context(), askTimeout)
	defer cancel()
	answer, err := client.Renew(ctx, names)
	if err != nil {
		return failed(err)
	}
	done, err := output.encode(cmd.OutOrStdout(), answer)
	if err != nil {
		return err
	}
	if !done {
		fmt.Fprintf(cmd.OutOrStdout(), "asked %d nodes to renew their certificates within %s\n",
			len(answer.Asked), span(time.Duration(answer.WithinSeconds)*time.Second))
	}
	for _, n := range answer.NotAsked {
		fmt.Fprintf(cmd.ErrOrStderr(), "warning: %s was not asked: %s\n", tunnel.Printable(n.Node), tunnel.Printable(n.Why))
	}
	for _, why := range answer.Incomplete {
		fmt.Fprintln(cmd.ErrOrStderr(), "warning: not every replica has asked its nodes: "+tunnel.Printable(why))
	}
	switch {
	case len(answer.Incomplete) > 0:
		return &exitError{exitRuntime, errors.New("not every replica has asked its nodes")}
	case len(answer.Away) > 0:
		return &exitError{exitAway, fmt.Errorf("not connected: %s", strings.Join(answer.Away, ", "))}
	case len(answer.NotAsked) > 0 && (len(names) > 0 || len(answer.Asked) == 0):
		return &exitError{exitRuntime, errors.New("nodes that were not asked: " + strconv.Itoa(len(answer.NotAsked)))}
	}
	return nil
}

// renewTimeout is how long the renewal of an edge's certificate may take: Kubernetes may sign it.
const renewTimeout = time.Minute

// renewOwn makes the edge of this machine renew its certificate.
func renewOwn(cmd *cobra.Command, ask *askFlags, output *outputFlag) error {
	sockets, err := ask.sockets()
	if err != nil {
		return err
	}
	i := slices.IndexFunc(sockets, func(s daemonSocket) bool { return s.mode != "cloud" })
	if i < 0 {
		return &exitError{exitUsage, errors.New("on a cloud, name nodes, or say --all")}
	}
	ctx, cancel := limited(cmd.Context(), renewTimeout)
	defer cancel()
	list, err := api.NewClient(sockets[i].path).RenewOwn(ctx)
	if err != nil {
		return failed(err)
	}
	return printCertificates(cmd.OutOrStdout(), list, output)
}

// onlyEnding removes from the list every certificate that ends after limit. It returns how many are left.
func onlyEnding(list *api.CertificateList, limit time.Time) (stay int) {
	later := func(c api.Certificate) bool { return c.Ends.After(limit) }
	for i := range list.Processes {
		p := &list.Processes[i]
		if p.Own != nil && later(*p.Own) {
			p.Own = nil
		}
		if p.Own != nil {
			stay++
		}
		p.CloudCAs, p.NodeCAs = slices.DeleteFunc(p.CloudCAs, later), slices.DeleteFunc(p.NodeCAs, later)
		stay += len(p.CloudCAs) + len(p.NodeCAs)
	}
	list.Nodes = slices.DeleteFunc(list.Nodes, func(n api.NodeCertificate) bool { return later(n.Certificate) })
	return stay + len(list.Nodes)
}

// certRow is a line of the table.
type certRow struct {
	kind, holder string
	api.Certificate
	note string
}

// certRows returns the lines of the table. A CA that several replicas have is one line.
func certRows(list *api.CertificateList) []certRow {
	var rows []certRow
	add := func(kind, holder string, c api.Certificate, note string) {
		same := func(r certRow) bool { return r.kind == kind && r.Serial == c.Serial && r.Name == c.Name }
		if kind == "cloud" || !slices.ContainsFunc(rows, same) {
			rows = append(rows, certRow{kind, holder, c, note})
		}
	}
	for _, p := range list.Processes {
		for _, c := range p.CloudCAs {
			add("cloud CA", c.Name, c, "")
		}
		for _, c := range p.NodeCAs {
			note := ""
			if c.Name == p.Signer {
				note = "signs"
			}
			add("nodes CA", c.Name, c, note)
		}
		note := ""
		if !p.RenewAt.IsZero() {
			note = "renews in " + span(p.RenewAt.Sub(list.Time))
		}
		if p.Own != nil {
			add(list.Mode, cmp.Or(list.Node, p.Replica), *p.Own, note)
		}
	}
	for _, n := range list.Nodes {
		rows = append(rows, certRow{"node", n.Node, n.Certificate, string(n.State)})
	}
	return rows
}

// printCertificates prints the list in the form of the flag.
func printCertificates(w io.Writer, list *api.CertificateList, output *outputFlag) error {
	if done, err := output.encode(w, list); done {
		return err
	}
	rows := certRows(list)
	wide := output.form == "wide"
	head := "KIND\tHOLDER\tSIGNED BY\tENDS\tSERIAL\tNOTE"
	if wide {
		head += "\tSTARTS AT\tENDS AT"
	}
	err := printTable(w, head, len(rows), "no certificates", func(i int) []string {
		r := &rows[i]
		serial := r.Serial
		if !wide && len(serial) > 12 {
			serial = serial[:12] + "…"
		}
		line := []string{
			r.kind, r.holder, cmp.Or(r.Signer, "-"), span(r.Ends.Sub(list.Time)), cmp.Or(serial, "-"), cmp.Or(r.note, "-"),
		}
		if wide {
			starts := "-"
			if !r.Starts.IsZero() {
				starts = r.Starts.Format(time.RFC3339)
			}
			line = append(line, starts, r.Ends.Format(time.RFC3339))
		}
		return line
	})
	if err != nil || len(rows) == 0 {
		return err
	}
	for _, p := range list.Processes {
		if p.Signer != "" && !slices.ContainsFunc(rows, func(r certRow) bool { return r.Name == p.Signer }) {
			fmt.Fprintf(w, "%s signs nodes' certificates.\n", tunnel.Printable(p.Signer))
			break
		}
	}
	if list.Without > 0 {
		fmt.Fprintf(w, "%d nodes, connected or away, have no certificate that the cloud knows.\n", list.Without)
	}
	return nil
}
