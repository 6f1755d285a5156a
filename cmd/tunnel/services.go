package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"tunnel.example/tunnel/pkg/services/relay"
	"tunnel.example/tunnel/pkg/tunnel"
)

func newServicesCommand() *cobra.Command {
	group := newGroup("services", "Show what the edge of this machine knows of Services, and what it does with them")
	group.AddCommand(newServicesLsCommand(), newServicesExplainCommand(), newServicesWatchCommand())
	return group
}

// askServices asks the edge for the ports of all Services (path ""), or of one.
func askServices(ctx context.Context, ask *askFlags, path string) (*relay.List, error) {
	client, err := ask.edge()
	if err != nil {
		return nil, err
	}
	ctx, cancel := limited(ctx, askTimeout)
	defer cancel()
	list := new(relay.List)
	if err := client.Call(ctx, http.MethodGet, "/v1/services"+path, nil, list); err != nil {
		return nil, failed(err)
	}
	return list, nil
}

func newServicesLsCommand() *cobra.Command {
	var ask askFlags
	var output outputFlag
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the ports of Services, and who serves them on this node",
		Long: `ls lists the ports of the cluster's Services (TCP, UDP) at each ClusterIP, as this machine's edge knows them.
With mode = "full", it also lists SCTP, external IPs and node ports; 0.0.0.0 and :: are each address of the node.

SERVED BY is who serves connections from this node:
  rules       the edge's rules in the kernel: they lead to endpoints that this node reaches by itself
  relay       the edge, through the tunnel
  kube-proxy  kube-proxy; the edge does nothing
  nobody      no endpoint is ready, or none may be used from this node

USABLE is how many of the Service's endpoints a connection may get.

Exit codes: 0 ok, 1 no edge answers, 3 the configuration names no admin socket of an edge.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.check(); err != nil {
				return err
			}
			list, err := askServices(cmd.Context(), &ask, "")
			if err != nil {
				return err
			}
			warnStale(cmd.ErrOrStderr(), list)
			return printPorts(cmd.OutOrStdout(), list, &output)
		},
	}
	ask.register(cmd, edgeFile)
	output.register(cmd, "table", "wide", "json", "yaml")
	return cmd
}

// warnStale prints a warning if the edge's list of Services may be older than the cloud's.
func warnStale(w io.Writer, list *relay.List) {
	switch {
	case list.Stale == nil:
	case list.Stale.IsZero():
		fmt.Fprintln(w, "warning: the cloud has never sent this edge any Services: tunnel status says why")
	default:
		fmt.Fprintf(w, "warning: this is what the cloud has sent until %s: tunnel status says why\n",
			list.Stale.Local().Format("2006-01-02 15:04:05"))
	}
}

// printPorts prints the list in the form of the flag.
func printPorts(w io.Writer, list *relay.List, output *outputFlag) error {
	if done, err := output.encode(w, list); done {
		return err
	}
	wide := output.form == "wide"
	head := "SERVICE\tADDRESS\tPROTOCOL\tPORT\tSERVED BY\tUSABLE"
	if wide {
		head += "\tKNOWN\tNAME"
	}
	return printTable(w, head, len(list.Ports), "no Services", func(i int) []string {
		p := &list.Ports[i]
		line := []string{p.Service, p.Address, p.Protocol, strconv.Itoa(int(p.Port)), string(p.Served),
			strconv.Itoa(p.Usable)}
		if wide {
			line = append(line, strconv.Itoa(p.Known), cmp.Or(p.Name, "-"))
		}
		return line
	})
}

func newServicesExplainCommand() *cobra.Command {
	var ask askFlags
	var output outputFlag
	cmd := &cobra.Command{
		Use:   "explain NAMESPACE/NAME",
		Short: "Say of each endpoint of a Service why a connection may get it, or not",
		Long: `explain shows each port of a Service (TCP, UDP) at each ClusterIP, who serves it here, and its endpoints.

  tunnel services explain shop/web

Exit codes: 0 ok, 1 no edge answers, or the edge knows no such Service; 2 wrong command line; 3 the configuration names
no admin socket of an edge.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 || !isServiceName(args[0]) {
				return errors.New("name one Service, as NAMESPACE/NAME")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := output.check(); err != nil {
				return err
			}
			namespace, name, _ := strings.Cut(args[0], "/")
			list, err := askServices(cmd.Context(), &ask, "/"+url.PathEscape(namespace)+"/"+url.PathEscape(name))
			if err != nil {
				return err
			}
			warnStale(cmd.ErrOrStderr(), list)
			return printExplained(cmd.OutOrStdout(), args[0], list, &output)
		},
	}
	ask.register(cmd, edgeFile)
	output.register(cmd, "text", "json", "yaml")
	return cmd
}

// isServiceName reports whether an argument is NAMESPACE/NAME.
func isServiceName(s string) bool {
	namespace, name, ok := strings.Cut(s, "/")
	return ok && namespace != "" && name != "" && !strings.Contains(name, "/")
}

// printExplained prints the ports of a Service and their endpoints in the form of the flag.
func printExplained(w io.Writer, service string, list *relay.List, output *outputFlag) error {
	if done, err := output.encode(w, list); done {
		return err
	}
	if len(list.Ports) == 0 {
		_, err := fmt.Fprintf(w, "%s has no TCP or UDP port at a ClusterIP\n", tunnel.Printable(service))
		return err
	}
	for i := range list.Ports {
		p := &list.Ports[i]
		if i > 0 {
			fmt.Fprintln(w)
		}
		at := fmt.Sprintf("%s port %d", p.Address, p.Port)
		if p.Name != "" {
			at += " (" + p.Name + ")"
		}
		fmt.Fprintf(w, "%s: served by %s\n", tunnel.Printable(at), tunnel.Printable(string(p.Served)))
		err := printTable(w, "  ENDPOINT\tPORT\tNODE\tZONE\tUSABLE\tWHY", len(p.Endpoints), "  no endpoints",
			func(i int) []string {
				e := &p.Endpoints[i]
				usable, port := "no", "-"
				if e.Usable {
					usable = "yes"
				}
				if e.Port != 0 {
					port = strconv.Itoa(int(e.Port))
				}
				return []string{"  " + e.Address, port, cmp.Or(e.Node, "-"), cmp.Or(e.Zone, "-"), usable, e.Why}
			})
		if err != nil {
			return err
		}
	}
	return nil
}

func newServicesWatchCommand() *cobra.Command {
	var ask askFlags
	var output outputFlag
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Show each change of Services that the cloud sends, until Ctrl-C",
		Long: `watch prints a line for each item that the cloud sets or deletes: a Service, an endpoint or a node.
It shows changes, and not what the edge knows already: tunnel services ls does.
A reader that is too slow loses lines; a warning says how many. With -o json each change is a line, and with -o yaml a
document.

Exit codes: 0 ended by Ctrl-C, 1 no edge answers, or the edge has stopped.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.check(); err != nil {
				return err
			}
			client, err := ask.edge()
			if err != nil {
				return err
			}
			err = client.Lines(cmd.Context(), "/v1/services/watch", func(text []byte) error {
				return printChange(cmd.OutOrStdout(), cmd.ErrOrStderr(), text, &output)
			})
			if cmd.Context().Err() != nil { // Ctrl-C
				return nil
			}
			return failed(err)
		},
	}
	ask.register(cmd, edgeFile)
	output.register(cmd, "text", "json", "yaml")
	return cmd
}

// printChange prints a line of the edge. A line for programs is printed as it came.
func printChange(out, errs io.Writer, text []byte, output *outputFlag) error {
	if done, err := output.encodeLine(out, json.RawMessage(text)); done {
		return err
	}
	var line relay.Line
	if err := json.Unmarshal(text, &line); err != nil {
		return fmt.Errorf("a line is no change: %w", err)
	}
	if line.Lost > 0 {
		_, err := fmt.Fprintf(errs, "warning: %d changes are lost, because this reader is too slow\n", line.Lost)
		return err
	}
	what, value := "set", string(line.Value)
	if line.Deleted {
		what, value = "deleted", ""
	}
	_, err := fmt.Fprintln(out, strings.TrimRight(fmt.Sprintf("%s  %-7s  %s  %s", line.Time.Local().Format("15:04:05.000"),
		what, tunnel.Printable(line.Path), tunnel.Printable(value)), " "))
	return err
}
