package setup

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/kube"
)

// ClusterConfig says where InitCluster puts what a cloud in Kubernetes needs.
type ClusterConfig struct {
	Address   string   // what edges dial, host:port
	Names     []string // further names and IP addresses for the cloud's certificate
	Client    *kube.Client
	Namespace string
	Secret    string    // the Secret of the cloud
	ConfigMap string    // the ConfigMap with the CA that edges verify the cloud with; no edge may read the Secret
	Out       io.Writer // a line for each object
}

// InitCluster makes a Secret with the certificates, keys and token file of a cloud, and a ConfigMap with the
// CA of the cloud. Objects that exist stay as they are, so a Job may run InitCluster again and again. InitCluster
// discards the key of the cloud's CA: afterwards nobody can issue another certificate by that CA.
func InitCluster(ctx context.Context, cfg ClusterConfig) error {
	hosts, _, err := certificateHosts(cfg.Address, cfg.Names)
	if err != nil {
		return err
	}
	err = cfg.ensure(ctx, hosts)
	if kube.ReasonFor(err) == kube.Conflict { // another pod has created one of the objects meanwhile
		err = cfg.ensure(ctx, hosts)
	}
	if kube.ReasonFor(err) == kube.Forbidden {
		return fmt.Errorf("%w: the service account needs these rights in the namespace %s: create on secrets and "+
			"configmaps, get on the secret %s and on the configmap %s", err, cfg.Namespace, cfg.Secret, cfg.ConfigMap)
	}
	return err
}

// ensure creates the Secret and the ConfigMap, unless they exist.
func (cfg ClusterConfig) ensure(ctx context.Context, hosts []string) error {
	secret := fmt.Sprintf("secret %s/%s", cfg.Namespace, cfg.Secret)
	data, found, err := cfg.Client.Secret(ctx, cfg.Namespace, cfg.Secret)
	if err != nil {
		return fmt.Errorf("%s: %w", secret, err)
	}
	configMap := cfg.Client.ConfigMap(cfg.Namespace, cfg.ConfigMap, caFile)
	public, err := configMap.Load(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", configMap, err)
	}
	switch {
	case found:
		fmt.Fprintf(cfg.Out, "%s stays as it was\n", secret)
	case public.Version != "":
		return fmt.Errorf("%s is there without %s: edges that have its CA would refuse a new cloud; "+
			"restore the secret, or delete the configmap and run this again", configMap, secret)
	default:
		if data, err = secretData(hosts); err != nil {
			return err
		}
		if err = cfg.Client.CreateSecret(ctx, cfg.Namespace, cfg.Secret, data); err != nil {
			return fmt.Errorf("%s: %w", secret, err)
		}
		fmt.Fprintf(cfg.Out, "%s created, with %s; the certificate is for %s\n", secret,
			strings.Join(slices.Sorted(maps.Keys(data)), ", "), strings.Join(hosts, ", "))
	}
	cas, err := authorities(secret, string(data[caFile]))
	if err != nil {
		return err
	}
	if public.Version != "" {
		return cfg.checkPublic(configMap.String(), public.Text, cas)
	}
	if _, err = configMap.Save(ctx, public, string(data[caFile])); err != nil {
		return fmt.Errorf("%s: %w", configMap, err)
	}
	fmt.Fprintf(cfg.Out, "%s created, with %s\n", configMap, caFile)
	return nil
}

// checkPublic returns an error unless the ConfigMap holds all CAs of the Secret. The ConfigMap may hold further
// CAs, for instance while an operator replaces a CA.
func (cfg ClusterConfig) checkPublic(configMap, text string, cas []*x509.Certificate) error {
	public, err := authorities(configMap, text)
	if err != nil {
		return err
	}
	for _, ca := range cas {
		if !slices.ContainsFunc(public, ca.Equal) {
			return fmt.Errorf("%s holds another CA than the secret %s, so edges refuse the cloud: "+
				"delete the configmap, and run this again", configMap, cfg.Secret)
		}
	}
	fmt.Fprintf(cfg.Out, "%s stays as it was\n", configMap)
	return nil
}

// authorities parses text, the value of the key ca.crt in a Secret or ConfigMap. Errors call it object.
func authorities(object, text string) ([]*x509.Certificate, error) {
	cas, err := auth.ParseCertificates([]byte(text))
	if err == nil && len(cas) == 0 {
		err = errors.New("it holds no certificate")
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %s: %w", object, caFile, err)
	}
	return cas, nil
}

// secretData returns the data of a new cloud's Secret. The certificate and the key have the same names as in a
// Secret of type kubernetes.io/tls, so a Secret of another issuer, such as cert-manager, can replace this Secret.
func secretData(hosts []string) (map[string][]byte, error) {
	made, err := newCredentials(hosts)
	if err != nil {
		return nil, err
	}
	return map[string][]byte{
		caFile: made.ca, "tls.crt": made.cert, "tls.key": made.key,
		nodesCAFile: made.nodesCA, nodesKeyFile: made.nodesCAKey,
		tokensFile: []byte(emptyTokens),
	}, nil
}
