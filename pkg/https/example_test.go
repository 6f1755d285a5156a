package https_test

import (
	"context"
	"log/slog"

	"tunnel.example/tunnel/pkg/https"
	"tunnel.example/tunnel/pkg/reload"
	"tunnel.example/tunnel/pkg/tunnel"
)

// A cloud opens the kubelet's port. It passes connections for connected nodes through, and terminates
// connections of kube-apiserver without an SNI.
func Example() {
	serve := func(ctx context.Context, files *reload.Files, directory *tunnel.Directory, log *slog.Logger) error {
		pair, err := files.Pair("mode.cloud.https", "https.crt", "https.key")
		if err != nil {
			return err
		}
		callers, err := files.Pool("mode.cloud.https clientca", "kube-apiserver-ca.crt")
		if err != nil {
			return err
		}
		client, err := files.Pair("mode.cloud.https.kubelet", "kubelet-client.crt", "kubelet-client.key")
		if err != nil {
			return err
		}
		kubelets, err := files.Pool("mode.cloud.https.kubelet ca", "kubelet-ca.crt")
		if err != nil {
			return err
		}
		door, err := https.New(https.Config{
			Ports:       map[string]string{"10250": "127.0.0.1:10250"},
			Certificate: pair.Certificate, ClientCA: callers.Pool,
			Kubelet: https.Kubelet{Certificate: client.Certificate, CA: kubelets.Pool},
		}, directory, directory, log)
		if err != nil {
			return err
		}
		return door.Run(ctx)
	}
	_ = serve
}
