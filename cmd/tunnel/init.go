package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"tunnel.example/tunnel/pkg/kube"
	"tunnel.example/tunnel/pkg/setup"
)

// setupError gives an error of pkg/setup its exit code.
func setupError(err error) error {
	if err == nil {
		return nil
	}
	code := exitRuntime
	if e, ok := errors.AsType[*setup.Error](err); ok {
		switch e.Kind {
		case setup.KindFailed:
		case setup.KindUsage:
			code = exitUsage
		case setup.KindConfig:
			code = exitConfig
		case setup.KindRefused:
			code = exitRefused
		}
	}
	return &exitError{code, err}
}

// host returns what pkg/setup needs to know of this process.
func host() setup.Host {
	return setup.Host{Env: environment(), Sudo: os.Getenv("SUDO_USER") != "", Software: software()}
}

// initFlags are the flags of `tunnel init`.
type initFlags struct {
	address, dir      string
	names             []string
	systemd           bool
	secret, configMap string
}

func newInitCommand() *cobra.Command {
	var flags initFlags
	cmd := &cobra.Command{
		Use:   "init --address HOST:PORT",
		Short: "Make what a cloud needs: authorities, certificate, token file, configuration",
		Long: `init makes a folder with everything that ` + "`tunnel cloud`" + ` needs on a machine without
Kubernetes. It never replaces a file. With --systemd it also starts the cloud.

  sudo tunnel init --address tunnel.example.com:9000 --systemd
  sudo tunnel token create --node edge1

In a pod, with --secret and --configmap, init makes no folder. It puts ca.crt, tls.crt, tls.key,
nodes-ca.crt, nodes-ca.key and tokens into a Secret, and ca.crt alone into a ConfigMap, for edges.
Both are in the namespace that the variable POD_NAMESPACE names. Objects that exist stay as they are.

  tunnel init --address tunnel.example.com:9000 --secret tunnel-cloud --configmap tunnel-ca

Exit codes: 0 made, 1 a step failed, 2 wrong command line, 3 a configuration that exists has a problem.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("secret") {
				if flags.secret == "" || flags.configMap == "" { // such as a variable of a Job that is not set
					return &exitError{exitUsage, errors.New("--secret and --configmap each need a name, which is not empty")}
				}
				return setupError(flags.initCluster(cmd))
			}
			return setupError(setup.Init(cmd.Context(), setup.InitConfig{
				Address: flags.address, Names: flags.names, Dir: flags.dir, Systemd: flags.systemd,
				Host: host(), Out: cmd.OutOrStdout(),
			}))
		},
	}
	f := cmd.Flags()
	f.StringVar(&flags.address, "address", "",
		"where edges will dial, `host:port`: a name or an address of this machine")
	f.StringSliceVar(&flags.names, "san", nil,
		"another `name` or address for the cloud's certificate, such as the name of a Service; may be repeated")
	f.StringVar(&flags.dir, "dir", setup.DefaultDir, "folder to put the files into")
	f.BoolVar(&flags.systemd, "systemd", false, "have systemd start the cloud, now and with the machine")
	f.StringVar(&flags.secret, "secret", "", "`name` of the Secret to put the files into, in place of --dir")
	f.StringVar(&flags.configMap, "configmap", "", "`name` of the ConfigMap to put ca.crt into, beside --secret")
	cmd.MarkFlagsRequiredTogether("secret", "configmap")
	cmd.MarkFlagsMutuallyExclusive("secret", "dir")
	cmd.MarkFlagsMutuallyExclusive("secret", "systemd")
	if err := cmd.MarkFlagRequired("address"); err != nil {
		panic(err) // the flag was added above
	}
	return cmd
}

// initCluster makes a Secret and a ConfigMap in the namespace of this pod.
func (f *initFlags) initCluster(cmd *cobra.Command) error {
	namespace := environment().PodNamespace
	if namespace == "" {
		return &setup.Error{Kind: setup.KindUsage, Err: errors.New("--secret: POD_NAMESPACE is not set: " +
			"let the pod set it from metadata.namespace")}
	}
	klog.SetSlogLogger(slog.New(slog.DiscardHandler)) // client-go logs there; what fails is in the error
	client, err := kube.New(os.Getenv("KUBECONFIG"), "tunnel/"+software())
	if err != nil {
		return fmt.Errorf("--secret: %w", err)
	}
	return setup.InitCluster(cmd.Context(), setup.ClusterConfig{
		Address: f.address, Names: f.names, Client: client, Namespace: namespace,
		Secret: f.secret, ConfigMap: f.configMap, Out: cmd.OutOrStdout(),
	})
}
