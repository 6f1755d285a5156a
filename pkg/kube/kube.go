// Package kube is the little of Kubernetes that the cloud needs: the names of the
// nodes ([Nodes]), one key of a ConfigMap ([ConfigMap]), a Lease to elect a writer
// ([Lease]), where a Service's pods are ([Client.Replicas]), whose a token is
// ([Client.ReviewToken]), certificates for nodes ([Signer]), and the node of a pod
// ([Pods]).
//
//	c, err := kube.New(os.Getenv("KUBECONFIG"), "tunnel/v1.2.3")
//	cm := c.ConfigMap("tunnel-system", "tunnel-nodes", "hosts")
//	old, err := cm.Load(ctx)
//	now, err := cm.Save(ctx, old, text) // ReasonFor(err) == Conflict: somebody was faster
//
// It is client-go's REST client, metadata client and reflector, and none of the typed
// API, which would cost more than all of them together. Objects are changed by merge
// patches that carry the version they were read at, so that nothing is touched that is
// not ours, and two writers never overwrite each other. Requests are not repeated in
// here: a caller that waits in its own way can also say what it waits for.
//
// What the rights are for is in deployment/cloud-rbac.yaml.
package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	// requestTimeout bounds one request, watches excepted. A Lease must be renewed
	// within renewDeadline, so two attempts have to fit.
	requestTimeout = 4 * time.Second

	// A guard against our own mistakes, not a pace: what runs in here asks once or twice
	// a second.
	requestsPerSecond = 20
	requestBurst      = 40

	// What nodes cause by joining has a guard of its own: thousands may come back at once,
	// and must neither wait at the pace above nor make a Lease wait.
	joinsPerSecond = 200
	joinBurst      = 400

	// Reads of pods have a rate limit of their own.
	podsPerSecond = 100
	podBurst      = 200
)

// Client is a connection to a Kubernetes API server. It is for any goroutine.
type Client struct {
	objects objects
	joins   objects          // for reviews and certificates
	pods    objects          // for Pods
	nodes   *rest.RESTClient // for Reaches
	watches metadata.Interface
	host    string
}

// New returns a client for the API server that the file kubeconfig names, or, when it
// is empty, for the one of the pod that we run in. It does not connect yet.
func New(kubeconfig, userAgent string) (*Client, error) {
	config, err := restConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	config.UserAgent = userAgent
	config.QPS, config.Burst = requestsPerSecond, requestBurst
	config.WarningHandlerWithContext = rest.NoWarnings{} // of deprecated APIs; we ask for none

	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, v1) // for the Status of a refusal
	client, err := restClient(config, scheme)
	if err != nil {
		return nil, fmt.Errorf("kubernetes client: %w", err)
	}
	watches, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("kubernetes client: %w", err)
	}
	nodes, err := nodesClient(config)
	if err != nil {
		return nil, fmt.Errorf("kubernetes client: %w", err)
	}
	config.QPS, config.Burst = joinsPerSecond, joinBurst
	joins, err := restClient(config, scheme)
	if err != nil {
		return nil, fmt.Errorf("kubernetes client: %w", err)
	}
	config.QPS, config.Burst = podsPerSecond, podBurst
	pods, err := restClient(config, scheme)
	if err != nil {
		return nil, fmt.Errorf("kubernetes client: %w", err)
	}
	return &Client{objects: restObjects{client}, joins: restObjects{joins}, pods: restObjects{pods}, nodes: nodes, watches: watches, host: config.Host}, nil
}

// restClient is a client that knows the types of a scheme.
func restClient(config *rest.Config, scheme *runtime.Scheme) (*rest.RESTClient, error) {
	config = rest.CopyConfig(config)
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.GroupVersion = &v1
	return rest.UnversionedRESTClientFor(config)
}

// Host returns the address of the API server, for the operator's eyes.
func (c *Client) Host() string { return c.host }

func restConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig != "" {
		config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
		}
		return config, nil
	}
	config, err := rest.InClusterConfig()
	switch {
	case errors.Is(err, rest.ErrNotInCluster):
		return nil, errors.New("this is no pod, and KUBECONFIG is not set: set it to the file that names the API server, or run without Kubernetes: without configmap in [mode.cloud.stream.dns], serviceaccounts and signer in [mode.cloud.join], and kubernetes in [mode.cloud.https] and [mode.cloud.egress]")
	case err != nil:
		return nil, fmt.Errorf("reading the pod's service account (is automountServiceAccountToken off?): %w", err)
	}
	return config, nil
}

// objects is what is asked of an API server; tests have one in memory. Errors are those
// of apimachinery's api/errors.
type objects interface {
	// get reads the object at a path into out.
	get(ctx context.Context, path string, out any) error
	// list reads the objects of a collection that match a label selector.
	list(ctx context.Context, path, selector string, out any) error
	// create posts an object to the path of its collection.
	create(ctx context.Context, path string, object, out any) error
	// patch merges (RFC 7386) into the object at a path; out gets its new metadata only.
	patch(ctx context.Context, path string, patch, out any) error
	// delete removes the object at a path.
	delete(ctx context.Context, path string) error
}

type restObjects struct{ client *rest.RESTClient }

func (o restObjects) get(ctx context.Context, path string, out any) error {
	return do(ctx, o.client.Get().AbsPath(path), out)
}

func (o restObjects) list(ctx context.Context, path, selector string, out any) error {
	return do(ctx, o.client.Get().AbsPath(path).Param("labelSelector", selector), out)
}

func (o restObjects) create(ctx context.Context, path string, object, out any) error {
	body, err := json.Marshal(object)
	if err != nil {
		return err
	}
	return do(ctx, o.client.Post().AbsPath(path).SetHeader("Content-Type", "application/json").Body(body), out)
}

func (o restObjects) patch(ctx context.Context, path string, patch, out any) error {
	body, err := json.Marshal(patch)
	if err != nil {
		return err
	}
	return do(ctx, o.client.Patch(types.MergePatchType).AbsPath(path).
		SetHeader("Accept", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1").Body(body), out)
}

func (o restObjects) delete(ctx context.Context, path string) error {
	return do(ctx, o.client.Delete().AbsPath(path), new(struct{}))
}

func do(ctx context.Context, r *rest.Request, out any) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	result := r.MaxRetries(0).Do(ctx)
	if err := result.Error(); err != nil {
		return err
	}
	body, err := result.Raw()
	if err != nil {
		return err
	}
	return json.Unmarshal(body, out)
}

// object is what all objects have, as far as we look.
type object struct {
	Metadata struct {
		Name            string `json:"name,omitempty"`
		Namespace       string `json:"namespace,omitempty"`
		ResourceVersion string `json:"resourceVersion,omitempty"`
	} `json:"metadata"`
}

// named returns an object's metadata for a create or a patch. A patch with a version is
// refused as a conflict when the object has changed since, or is another one of that name.
func named(namespace, name, version string) object {
	var o object
	o.Metadata.Namespace, o.Metadata.Name, o.Metadata.ResourceVersion = namespace, name, version
	return o
}

func configMaps(namespace string) string {
	return path.Join("/api/v1/namespaces", namespace, "configmaps")
}

func leases(namespace string) string {
	return path.Join("/apis/coordination.k8s.io/v1/namespaces", namespace, "leases")
}

func endpointSlices(namespace string) string {
	return path.Join("/apis/discovery.k8s.io/v1/namespaces", namespace, "endpointslices")
}
